"""An app in a process of its own that says given tokens, with drafts right as often as measured."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.drafts.traces import Trace
from llmaas_eval.switching.groups import MemoryGroup
from llmaas_hooks import Guess, LogitsView, hookimpl
from llmaas_plugins.elastic.contexts import ElasticContext
from llmaas_plugins.elastic.drafting import LevelDrafter
from llmaas_plugins.elastic.level_drafts import LevelDrafts
from llmaas_plugins.machine import peak_bytes

__all__ = ["App", "Setup"]

_N_PROMPT = 32
_SURE = 1e9


class Setup(NamedTuple):
    """How an app is made.

    Attributes:
        model: Prepared and packed model.
        group: Folder of the memory cgroup to run in; None for none.
        config: Configuration of the suite.
        n_ctx: Tokens of the context.
        traces: Drafts by level, which replace this model's.
    """

    model: str
    group: str | None
    config: Mapping[str, Any]
    n_ctx: int
    traces: Mapping[str, Sequence[Trace]]


class App(contextlib.AbstractContextManager["App"]):
    """An app in its own process."""

    def __init__(self, setup: Setup) -> None:
        """Start the process and load the model."""
        self._process = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_open, initargs=(setup,)
        )

    def say(self, n: int, seed: int) -> float:
        """Say ``n`` random tokens after a random prompt; return seconds per token."""
        return self._process.submit(_say, n, seed).result()

    def report(self) -> dict[str, Any]:
        """Return the drafts, the streamed model, and the process's peak."""
        return self._process.submit(_report).result()

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.shutdown()


# -- in the process -----------------------------------------------------------------------------


class _Forced:
    """Plugin that makes the engine say given tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_said = 0

    @hookimpl(trylast=True)
    def llmaas_logits(self, view: LogitsView) -> None:
        """Make the next token the likeliest one."""
        view.logits[self.tokens[self.n_said]] = _SURE
        self.n_said += 1


_stack = contextlib.ExitStack()
_forced = _Forced()
_llama: Any = None
_suite: Any = None


def _open(setup: Setup) -> None:
    global _llama, _suite  # noqa: PLW0603  one process has one app
    from llama_cpp import Llama

    from llmaas_plugins import activate
    from llmaas_plugins.elastic import plugin

    if setup.group is not None:
        MemoryGroup(Path(setup.group)).join()
    plugin.LevelDrafter = functools.partial(_emulating, setup.traces)  # type: ignore[attr-defined,assignment]
    _suite = _stack.enter_context(activate(dict(setup.config), {"forced": _forced}))
    settings = {"n_batch": 128, "n_ubatch": 128, "n_threads": 2, "n_threads_batch": 2}
    _llama = Llama(setup.model, n_ctx=setup.n_ctx, flash_attn=True, verbose=False, **settings)


def _emulating(
    traces: Mapping[str, Sequence[Trace]],
    context: ElasticContext,
    drafts: LevelDrafts,
    guess: Guess,
) -> LevelDrafter:
    """Return the drafter of a request, whose level is as often right as in the traces.

    The engine evaluates every drafted token at the level. Only the logits that the drafter sees are
    others: the likeliest token is the right one, or another one, with the probability in a trace.
    """
    rng = np.random.default_rng(len(_forced.tokens))

    def emulated(level: int, most: int, pick: Any) -> list[int]:
        share = traces[str(drafts.levels[level])]
        n_right, owns = share[int(rng.integers(len(share)))]
        first, places = _forced.n_said, iter(range(most))

        def pick_emulated(logits: NDArray[np.float32]) -> tuple[int, bool]:
            place = next(places)
            right = _forced.tokens[first + place]
            token = right if place < n_right else right + 1
            rest = (1 - owns[place]) / (len(logits) - 1)
            shown = np.full(len(logits), np.log(max(rest, 1e-12)), np.float32)
            shown[token] = np.log(owns[place])
            found: tuple[int, bool] = pick(shown)
            return found

        return guess(level, most, pick_emulated)

    return LevelDrafter(context, drafts, emulated)


def _say(n: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(300, 4000, _N_PROMPT).tolist()
    _forced.tokens, _forced.n_said = rng.integers(300, 4000, n + 2 * _N_PROMPT).tolist(), 0
    _llama.reset()
    with contextlib.closing(_llama.generate(prompt, temp=0.0)) as generator:
        said = [next(generator)]
        started = time.perf_counter()
        said += [next(generator) for _ in range(n)]
        seconds = (time.perf_counter() - started) / n
    assert said == _forced.tokens[: n + 1]
    return seconds


def _report() -> dict[str, Any]:
    status = _suite.status()["plugins"]
    return {
        "drafts": status["elastic"]["drafts"],
        "weights": status["flash_weights"]["models"],
        "peak_bytes": peak_bytes(),
    }
