"""An app in its own memory cgroup, to measure its speed and memory under a limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.switching.groups import MemoryGroup
from llmaas_plugins.machine import peak_bytes

__all__ = ["LimitedApp"]

_PROMPT = range(300, 332)


class LimitedApp(contextlib.AbstractContextManager["LimitedApp"]):
    """A process with a ``Llama`` in a cgroup that limits memory and page cache.

    It runs on two threads, unless the settings say something else.
    """

    def __init__(
        self,
        model: Path,
        group: MemoryGroup | None,
        config: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
        *,
        repacks: bool = True,
    ) -> None:
        """Start the process.

        Args:
            model: GGUF file.
            group: Cgroup to run in; its limit is already set. None sets no limit.
            config: Configuration of the suite; with ``None``, the process runs stock llama.cpp.
            settings: Further arguments of ``Llama``.
            repacks: Whether llama.cpp repacks weights, as it does by default. Repacked weights are
                not pages of the model file, so the kernel cannot reclaim their memory.
        """
        self._process = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_open,
            initargs=(
                str(model),
                None if group is None else str(group.path),
                config,
                dict(settings),
                repacks,
            ),
        )

    def generate(self, n: int) -> float:
        """Generate the next ``n`` tokens; return seconds per token.

        Raises:
            BrokenProcessPool: The process was killed.
        """
        return self._process.submit(_generate, n).result()

    def read(self, n: int) -> float:
        """Evaluate ``n`` random tokens one by one; return seconds per token.

        The text that a random model generates soon repeats, so it always needs the same weights.
        Random tokens avoid that.
        """
        return self._process.submit(_read, n).result()

    def prompt(self, n: int) -> float:
        """Evaluate ``n`` random tokens as one prompt in an empty context; return the seconds."""
        return self._process.submit(_prompt, n).result()

    def tokens(self, n: int) -> list[int]:
        """Clear the context, evaluate the prompt, and return the first ``n`` generated tokens."""
        return self._process.submit(_tokens, n).result()

    def generate_drafted(self, n: int, at_a_time: int, accepted: float) -> tuple[float, float]:
        """Generate ``n`` tokens without and with drafts; return both seconds per token.

        Args:
            n: Tokens to generate. The settings must have ``logits_all``.
            at_a_time: Tokens of a draft.
            accepted: Probability that a drafted token is the one that the model generates.
        """
        return self._process.submit(_generate_drafted, n, at_a_time, accepted).result()

    def peak_bytes(self) -> int:
        """Return the process's peak resident memory (RSS) in bytes."""
        return self._process.submit(peak_bytes).result()

    def set_budget(self, n_bytes: int) -> None:
        """Change the memory budget of ``flash_weights``."""
        self._process.submit(_set_budget, n_bytes).result()

    def report(self) -> dict[str, Any]:
        """Return the status of ``flash_weights``."""
        return self._process.submit(_report).result()

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.shutdown()


# -- in the process -----------------------------------------------------------------------------

_stack = contextlib.ExitStack()
_llama: Any = None
_suite: Any = None
_generator: Any = None
_rng = np.random.default_rng(0)


def _open(
    model: str,
    group: str | None,
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
    if group is not None:
        MemoryGroup(Path(group)).join()
    if config is not None:
        from llmaas_plugins import activate

        _suite = _stack.enter_context(activate(dict(config)))
    threads = {"n_threads": 2, "n_threads_batch": 2}
    _llama = Llama(model, flash_attn=True, verbose=False, **(threads | settings))


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
