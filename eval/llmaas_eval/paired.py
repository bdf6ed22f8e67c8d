"""Paired timing: ours and vanilla run in turn many times, alternating which goes first."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llmaas_eval.stats import median_interval, quartiles

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
    ours_s: list[float] = []
    vanilla_s: list[float] = []

    def time_vanilla() -> None:
        before()
        vanilla_s.append(_seconds(vanilla))

    def setup() -> None:
        if len(ours_s) % 2 == 0:
            time_vanilla()
        before()

    def teardown() -> None:
        if len(vanilla_s) < len(ours_s):
            time_vanilla()

    for _ in range(2):  # warm up
        before()
        vanilla()
        before()
        ours()
    benchmark.pedantic(
        lambda: ours_s.append(_seconds(ours)),
        setup=setup,
        teardown=teardown,
        rounds=repeats(rounds),
    )
    ours_ms, vanilla_ms = 1e3 * np.array(ours_s), 1e3 * np.array(vanilla_s)
    median, low, high = median_interval(vanilla_ms / ours_ms)
    benchmark.extra_info.update(
        {
            "ours_ms": quartiles(ours_ms),
            "vanilla_ms": quartiles(vanilla_ms),
            "speedup": median,
            "speedup_low": low,
            "speedup_high": high,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
