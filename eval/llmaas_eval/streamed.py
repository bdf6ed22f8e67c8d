"""An app in a memory cgroup of its own: how fast it generates there, and what it takes."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.inference import peak_bytes
from llmaas_eval.switching.groups import MemoryGroup

__all__ = ["LimitedApp"]

_PROMPT = range(300, 332)


class LimitedApp(contextlib.AbstractContextManager["LimitedApp"]):
    """A process with a ``Llama`` of two threads that has so much memory, page cache included."""

    def __init__(
        self,
        model: Path,
        group: MemoryGroup,
        config: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
        *,
        repacks: bool = True,
    ) -> None:
        """Start it.

        Args:
            model: GGUF file.
            group: Where it runs; limited by now.
            config: Of the suite; without one, the process is stock.
            settings: Of the ``Llama``.
            repacks: Whether llama.cpp repacks weights, as it does by default. Repacked ones are no
                pages of the model file, so they take memory that nobody can take back.
        """
        self._process = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_open,
            initargs=(str(model), str(group.path), config, dict(settings), repacks),
        )

    def generate(self, n: int) -> float:
        """Seconds a token of the next ``n``.

        Raises:
            BrokenProcessPool: It was killed.
        """
        return self._process.submit(_generate, n).result()

    def read(self, n: int) -> float:
        """Seconds a token of reading ``n`` random ones, one by one.

        What a random model generates soon repeats itself, and so does what it reads of its weights.
        """
        return self._process.submit(_read, n).result()

    def prompt(self, n: int) -> float:
        """Seconds for ``n`` random tokens at once, from an empty context."""
        return self._process.submit(_prompt, n).result()

    def tokens(self, n: int) -> list[int]:
        """The first ``n`` tokens behind the prompt, anew."""
        return self._process.submit(_tokens, n).result()

    def generate_drafted(self, n: int, at_a_time: int, accepted: float) -> tuple[float, float]:
        """Seconds a token without and with drafts, of which this share is what comes next.

        The settings must have ``logits_all``.
        """
        return self._process.submit(_generate_drafted, n, at_a_time, accepted).result()

    def peak_bytes(self) -> int:
        """The most memory that it has had (RSS)."""
        return self._process.submit(peak_bytes).result()

    def set_budget(self, n_bytes: int) -> None:
        """Change the memory budget of ``flash_weights``."""
        self._process.submit(_set_budget, n_bytes).result()

    def report(self) -> dict[str, Any]:
        """What ``flash_weights`` says of itself."""
        return self._process.submit(_report).result()

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.shutdown()


# -- in the process -----------------------------------------------------------------------------

_stack = contextlib.ExitStack()
_llama: Any = None
_suite: Any = None
_generator: Any = None
_rng = np.random.default_rng(0)


def _open(
    model: str,
    group: str,
    config: Mapping[str, Any] | None,
    settings: dict[str, Any],
    repacks: bool,
) -> None:
    global _llama, _suite  # noqa: PLW0603  one process has one app
    from llama_cpp import Llama, llama_cpp

    if not repacks:
        defaults = llama_cpp.llama_model_default_params

        def unrepacked() -> Any:
            params = defaults()
            params.use_extra_bufts = False
            return params

        llama_cpp.llama_model_default_params = unrepacked
    MemoryGroup(Path(group)).join()
    if config is not None:
        from llmaas_plugins import activate

        _suite = _stack.enter_context(activate(dict(config)))
    threads = {"n_threads": 2, "n_threads_batch": 2}
    _llama = Llama(model, flash_attn=True, verbose=False, **threads, **settings)


def _generate(n: int) -> float:
    global _generator  # noqa: PLW0603
    if _generator is None or _llama.n_tokens + n >= _llama.n_ctx():
        _generator = _llama.generate(list(_PROMPT), temp=0.0)
        next(_generator)
    started = time.perf_counter()
    for _ in range(n):
        next(_generator)
    return (time.perf_counter() - started) / n


def _read(n: int) -> float:
    if _llama.n_tokens + n > _llama.n_ctx():
        _llama.reset()
    tokens = _rng.integers(300, _llama.n_vocab(), n).tolist()
    started = time.perf_counter()
    for token in tokens:
        _llama.eval([token])
    return (time.perf_counter() - started) / n


def _prompt(n: int) -> float:
    _llama.reset()
    tokens = _rng.integers(300, _llama.n_vocab(), n).tolist()
    started = time.perf_counter()
    _llama.eval(tokens)
    return time.perf_counter() - started


def _tokens(n: int) -> list[int]:
    _llama.reset()
    generator = _llama.generate(list(_PROMPT), temp=0.0)
    return [next(generator) for _ in range(n)]


def _generate_drafted(n: int, at_a_time: int, accepted: float) -> tuple[float, float]:
    from llama_cpp.llama_speculative import LlamaDraftModel

    script, rng = [*_PROMPT, *_tokens(n + at_a_time)], np.random.default_rng(0)

    class Scripted(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
        def __call__(self, input_ids: Any, **_: Any) -> Any:
            ahead = np.array(script[len(input_ids) :][:at_a_time], np.intc)
            return np.where(rng.random(len(ahead)) < accepted, ahead, ahead ^ 1).astype(np.intc)

    seconds = []
    for draft in (None, Scripted()):
        _llama.reset()
        _llama.draft_model = draft
        generator = _llama.generate(list(_PROMPT), temp=0.0)
        next(generator)
        started = time.perf_counter()
        for _ in range(n):
            next(generator)
        seconds.append((time.perf_counter() - started) / n)
    _llama.draft_model = None
    return seconds[0], seconds[1]


def _set_budget(n_bytes: int) -> None:
    _suite.plugin("flash_weights").set_memory_budget(n_bytes)


def _report() -> dict[str, Any]:
    return _suite.status()["plugins"]["flash_weights"]
