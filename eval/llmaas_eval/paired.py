"""Paired timing: ours and vanilla run in turn many times, alternating which goes first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llmaas_eval.stats import median_interval, quartiles
from llmaas_plugins.machine import peak_bytes

__all__ = ["compare", "repeats"]

Step = Callable[[], object]


def repeats(n: int) -> int:
    """Return ``n``, or at most 2 if ``LLMAAS_BENCH_QUICK`` is set to only check the benchmarks."""
    return min(n, 2) if os.environ.get("LLMAAS_BENCH_QUICK") else n


def compare(
    benchmark: Any, ours: Step, vanilla: Step, *, before: Step = lambda: None, rounds: int = 20
) -> None:
    """Time two steps in turn; pytest-benchmark's table shows ours, ``extra_info`` compares both.

    ``extra_info`` has both medians and quartiles in milliseconds and the process's peak memory in
    MiB. The speed-up is the median of the pairs' ratios, with its bootstrapped 95 % interval.

    Args:
        benchmark: The ``benchmark`` fixture.
        ours: Step to measure.
        vanilla: Step to compare with, timed in the same round.
        before: Step that restores the initial state before each timed step; not timed.
        rounds: Number of pairs.
    """
    pairs = _Pairs(ours, vanilla, before)
    pairs.warm_up()
    benchmark.pedantic(
        pairs.time_ours,
        setup=pairs.begin_round,
        teardown=pairs.end_round,
        rounds=repeats(rounds),
    )
    peak = peak_bytes() / (1 << 20)
    benchmark.extra_info.update(pairs.figures() | {"peak_rss_mib": peak})


class _Pairs:
    """Seconds of both steps in each round; which step goes first alternates."""

    def __init__(self, ours: Step, vanilla: Step, before: Step) -> None:
        self._ours, self._vanilla, self._before = ours, vanilla, before
        self._ours_s: list[float] = []
        self._vanilla_s: list[float] = []

    def warm_up(self) -> None:
        """Run both steps twice without timing them."""
        for step in (self._vanilla, self._ours) * 2:
            self._before()
            step()

    def begin_round(self) -> None:
        """Time vanilla first in every other round, and restore the state for ours."""
        if len(self._ours_s) % 2 == 0:
            self._time_vanilla()
        self._before()

    def time_ours(self) -> None:
        self._ours_s.append(_seconds(self._ours))

    def end_round(self) -> None:
        """Time vanilla if this round has not done so yet."""
        if len(self._vanilla_s) < len(self._ours_s):
            self._time_vanilla()

    def figures(self) -> dict[str, Any]:
        """Return both steps' quartiles in ms, and the speed-up with its interval."""
        ours_ms, vanilla_ms = 1e3 * np.array(self._ours_s), 1e3 * np.array(self._vanilla_s)
        median, low, high = median_interval(vanilla_ms / ours_ms)
        return {
            "ours_ms": quartiles(ours_ms),
            "vanilla_ms": quartiles(vanilla_ms),
            "speedup": median,
            "speedup_low": low,
            "speedup_high": high,
        }

    def _time_vanilla(self) -> None:
        self._before()
        self._vanilla_s.append(_seconds(self._vanilla))


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
