"""Measure the latency of each level on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from llmaas_plugins.elastic.latency import Curves, Latency, Machine
from llmaas_plugins.elastic.levels import level as at_level

__all__ = ["N_TOKENS", "ProfilePlan", "profile"]

N_TOKENS = 8
"""Number of tokens to time after the first one."""
_REPEATS, _WARM_TOKENS = 3, 16
_MORE_REPEATS, _MOST_SPREAD = 6, 1.2
"""Further runs of a prompt whose median time is so many times its fastest one."""


class ProfilePlan(NamedTuple):
    """Levels, threads and lengths to measure.

    Attributes:
        model: Name of the model's file.
        table: Name of the table of widths.
        levels: Levels, widest first.
        threads: Numbers of threads.
        lengths: Lengths of prompts; two or more, ascending.
    """

    model: str
    table: str
    levels: Sequence[float]
    threads: Sequence[int]
    lengths: Sequence[int]

    @property
    def held(self) -> tuple[int, ...]:
        """Lengths between ``lengths``, held out to estimate the interpolation error."""
        return tuple(round(math.sqrt(a * b)) for a, b in pairwise(self.lengths))

    @property
    def n_runs(self) -> int:
        """Number of prompts to evaluate."""
        lengths = len(self.lengths) + len(self.held)
        return _REPEATS * len(self.threads) * len(self.levels) * lengths


class _Run(NamedTuple):
    """Milliseconds to the first token, and per token after it."""

    ttft: float
    tpot: float


_Runs = dict[tuple[int, int, int], list[_Run]]
"""Runs by number of threads, index of the level, and length."""


def profile(
    llama: Any, plan: ProfilePlan, progress: Callable[[int], None] = lambda _n_left: None
) -> Latency:
    """Measure a ``Llama`` that was created while the plugin is active.

    Levels alternate, so that other load on the machine affects all of them.

    Args:
        llama: Model with room for the longest prompt and ``N_TOKENS`` more tokens.
        plan: Levels, threads and lengths to measure.
        progress: Called after each run with the number of runs that are left. Prompts whose times
            are unsteady add some in the end.
    """
    runs, n_left = _Runs(), plan.n_runs
    for repeat in range(_REPEATS):
        for n_threads in plan.threads:
            llama_cpp.llama_set_n_threads(llama.ctx, n_threads, n_threads)
            _run(llama, plan.levels[0], _WARM_TOKENS)
            for n_tokens in sorted((*plan.lengths, *plan.held)):
                for i in range(len(plan.levels)):
                    number = (i + repeat) % len(plan.levels)
                    run = _run(llama, plan.levels[number], n_tokens)
                    runs.setdefault((n_threads, number, n_tokens), []).append(run)
                    n_left -= 1
                    progress(n_left)
    _repeat_unsteady(llama, plan, runs, progress)
    return Latency(
        model=plan.model,
        table=plan.table,
        machine=Machine.this(),
        levels=tuple(plan.levels),
        threads=tuple(plan.threads),
        ttft=_curves(plan, runs, lambda run: run.ttft),
        tpot=_curves(plan, runs, lambda run: run.tpot),
    )


def _run(llama: Any, level: float, n_tokens: int) -> _Run:
    """Time a request with a new prompt of random tokens; their values do not affect the time."""
    prompt = np.random.default_rng(n_tokens).integers(llama.n_vocab(), size=n_tokens).tolist()
    llama.reset()
    with at_level(level), closing(llama.generate(prompt, temp=0.0)) as tokens:
        times = [time.perf_counter()]
        for _ in range(1 + N_TOKENS):
            next(tokens)
            times.append(time.perf_counter())
    first, *others = (1000 * taken for taken in np.diff(times))
    return _Run(float(first), float(statistics.median(others)))


def _repeat_unsteady(
    llama: Any, plan: ProfilePlan, runs: _Runs, progress: Callable[[int], None]
) -> None:
    """Time prompts again that other load on the machine has slowed down."""
    for _ in range(_MORE_REPEATS):
        unsteady = [key for key, found in runs.items() if _is_unsteady(found)]
        for n_done, key in enumerate(unsteady, 1):
            n_threads, number, n_tokens = key
            llama_cpp.llama_set_n_threads(llama.ctx, n_threads, n_threads)
            runs[key].append(_run(llama, plan.levels[number], n_tokens))
            progress(len(unsteady) - n_done)


def _is_unsteady(found: Sequence[_Run]) -> bool:
    times = [run.ttft for run in found]
    return statistics.median(times) > _MOST_SPREAD * min(times)


def _curves(plan: ProfilePlan, runs: _Runs, of: Callable[[_Run], float]) -> Curves:
    def table(numbers: Sequence[int], what: Callable[[list[float]], float]) -> Any:
        return tuple(
            tuple(
                tuple(what([of(run) for run in runs[n_threads, level, n]]) for n in numbers)
                for level in range(len(plan.levels))
            )
            for n_threads in plan.threads
        )

    return Curves(
        n_tokens=tuple(plan.lengths),
        ms=table(plan.lengths, statistics.median),
        spread_ms=table(plan.lengths, lambda times: max(times) - min(times)),
        held=plan.held,
        held_ms=table(plan.held, statistics.median),
    )
