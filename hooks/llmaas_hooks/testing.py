"""Contract kit for plugins' tests: run a plugin as the host does, and check what it does.

``check_contract`` runs a whole life of a plugin. ``running`` is for a plugin's own tests. Both need
an app that uses the plugin: a function that uses a real ``Llama`` (pass ``install`` of
``llmaas_patches``), or ``serve``, which fires the hooks of one request on a ``FakeEngine``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from llmaas_hooks.manager import HookManager
from llmaas_hooks.parked import ParkedSequences
from llmaas_hooks.request_stats import RequestStats
from llmaas_hooks.types import (
    DecodeStep,
    Engine,
    LogitsView,
    ModelLoad,
    Plugin,
    Request,
    Tokens,
)

__all__ = ["FakeEngine", "Install", "Running", "check_contract", "running", "serve"]

_UNKNOWN = "llmaas_unknown_key"
_N_VOCAB = 32
_HOST_THREAD = "llmaas-background"  # ends by itself, but `threading` keeps its entry


class _Installed(Protocol):
    def settle(self) -> None:
        """Wait until deferred work is done."""

    def revert(self) -> None:
        """Restore every original function."""


Install = Callable[[HookManager], _Installed]
"""Function that patches llama-cpp-python for a manager's plugins: ``llmaas_patches.install``."""


@dataclass(eq=False)
class FakeEngine:
    """Engine without llama.cpp (implements ``llmaas_hooks.Engine``); its addresses lead nowhere.

    ``defer`` runs jobs at once on another thread, as a plugin must not rely on the app's thread.
    """

    ctx: int = 1
    model: int = 2
    n_seq_max: int = 1
    llama: Any = None
    load: ModelLoad | None = None
    alteration: str | None = None
    n_spare: int = 0
    parked: ParkedSequences = field(default_factory=ParkedSequences)
    resident_app: str | None = None
    n_outputs: int = 1
    keeps_cells: bool = False
    can_drop_tokens: bool = True
    is_evaluating: bool = False
    tokens: Sequence[int] = ()

    @property
    def n_explained(self) -> int:
        """Number of leading tokens that the cells are known to hold: all of them."""
        return len(self.tokens)

    def resident_tokens(self) -> Tokens:
        """Return the tokens of sequence 0."""
        return np.array(self.tokens, dtype=np.int32)

    def require_evaluation(self) -> None:
        """Do nothing: there are no logits to reuse."""

    def defer(self, job: Callable[[], None]) -> None:
        """Run ``job`` on another thread, and raise its error."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(job).result()


def serve(
    hooks: HookManager,
    engine: Engine,
    tokens: Sequence[int],
    *,
    n_tokens: int = 3,
    **facts: Any,
) -> list[int]:
    """Fire the hooks of one request on a ``FakeEngine``; return the sampled tokens.

    Args:
        hooks: Manager of the plugins.
        engine: Engine that serves the request.
        tokens: The prompt.
        n_tokens: Number of tokens to sample: the most likely ones of logits that are all 0.
        **facts: Other fields of the ``Request``, such as ``context_id``.
    """
    request = Request(engine, np.array(tokens, dtype=np.int32), **{"context_id": None, **facts})
    hooks.request_begin(request, hooks.level(request))
    restored = hooks.kv_restore(request)
    n_reused = 0 if restored is None else restored.n_tokens
    n_batch, sampled = len(tokens) - n_reused, list[int]()
    for _ in range(n_tokens):
        hooks.evaluated(DecodeStep(engine.ctx, n_batch, 0.001))
        logits = np.zeros(_N_VOCAB, dtype=np.float32)
        hooks.logits(LogitsView(engine.ctx, 0, logits))
        sampled.append(int(logits.argmax()))
        n_batch = 1
    evaluated = np.array([*tokens, *sampled[:-1]], dtype=np.int32)
    hooks.kv_save(request, evaluated)
    stats = RequestStats(len(tokens), n_reused, n_tokens, 0.0, 0.001 if n_tokens else None, 0.01)
    hooks.request_end(request, stats)
    return sampled


@dataclass(frozen=True)
class Running:
    """Plugins that run.

    Attributes:
        hooks: Manager of the plugins; it raises their errors.
    """

    hooks: HookManager
    _installed: _Installed | None

    def status(self, name: str) -> dict[str, Any]:
        """Return a plugin's report, after deferred work is done."""
        if self._installed is not None:
            self._installed.settle()
        return self.hooks.status()[name]


@contextmanager
def running(plugins: Mapping[str, object], install: Install | None = None) -> Iterator[Running]:
    """Run plugins inside the block as the host does; an error of a plugin is raised to the app.

    Args:
        plugins: Plugins by name; the last one is called first.
        install: ``llmaas_patches.install``, for apps with a real ``Llama``. None for ``serve``.

    Raises:
        AssertionError: A plugin failed where the app was not told, for example in deferred work;
            or threads of a plugin still run after the block.
        PluginError: A plugin cannot be registered.
    """
    threads = set(threading.enumerate())
    hooks = HookManager("raise")
    with ExitStack() as stack:
        stack.callback(hooks.shutdown)
        for name, plugin in plugins.items():
            hooks.register(name, plugin)
        installed = None if install is None else install(hooks)
        if installed is not None:
            stack.callback(installed.revert)
        yield Running(hooks, installed)
        if installed is not None:
            installed.settle()
        assert hooks.errors() == {}, f"hooks failed: {hooks.errors()}"
    assert hooks.errors() == {}, f"hooks failed at the end: {hooks.errors()}"
    left = {one.name for one in threading.enumerate() if one not in threads} - {_HOST_THREAD}
    assert not left, f"threads still run after llmaas_shutdown: {sorted(left)}"


def check_contract(
    kind: type[Plugin],
    settings: Mapping[str, Any],
    use: Callable[[HookManager], object],
    install: Install | None = None,
) -> None:
    """Check that a plugin obeys the contract: its settings, its life, its results and its threads.

    Args:
        kind: The plugin's class.
        settings: Its settings, as in ``llmaas.toml``.
        use: App that makes requests: a function of the manager, which only ``serve`` needs. It is
            called on this thread, then on two threads at once, each with an engine of its own.
        install: As for ``running``.

    Raises:
        AssertionError: The plugin breaks the contract; the message says how.
        PluginError: A hook failed, or returned another type than its specification says.
    """
    _check_settings(kind, settings)
    config = kind.Config(**settings)
    threads, files = set(threading.enumerate()), _open_files()
    plugin = kind(config)
    started = set(threading.enumerate()) - threads
    assert not started, "the constructor starts a thread; start it later"
    opened = _open_files() - files
    assert not opened, f"the constructor opens files: {opened}; open them at the first use"
    with running({"unused": plugin}):
        pass  # the suite may end before the first use
    plugin = kind(config)  # kept until the end, as an object that is collected closes its files
    with running({"plugin": plugin}, install) as run:
        run.hooks.status()  # before the first use
        use(run.hooks)
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(use, run.hooks) for _ in range(2)]:
                done.result()
        run.hooks.status()
    left = _open_files() - files
    assert not left, f"files are open after llmaas_shutdown: {left}"


def _check_settings(kind: type[Plugin], settings: Mapping[str, Any]) -> None:
    """Check that the settings are frozen and refuse unknown keys."""
    try:
        kind.Config(**settings, **{_UNKNOWN: 1})
    except ValidationError:
        pass
    else:
        raise AssertionError('Config accepts unknown keys; set extra="forbid" in its model_config')
    config = kind.Config(**settings)
    for name in type(config).model_fields:
        try:
            setattr(config, name, getattr(config, name))
        except ValidationError:
            continue
        raise AssertionError("Config can be changed; set frozen=True in its model_config")


def _open_files() -> set[str]:
    """Return the paths of the regular files that this process has open."""
    found = set[str]()
    for one in Path("/proc/self/fd").iterdir():
        try:
            path = os.readlink(one)  # noqa: PTH115  it may be no path
        except FileNotFoundError:  # the folder's own descriptor
            continue
        if Path(path).is_file():
            found.add(path)
    return found
