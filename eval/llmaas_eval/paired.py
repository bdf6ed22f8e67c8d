"""Ours against vanilla in one run: in turn, alternating which goes first, many times."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.demo.interval import median_interval

__all__ = ["compare", "quartiles", "repeats"]

Step = Callable[[], object]


def repeats(n: int) -> int:
    """``n``, or two where ``LLMAAS_BENCH_QUICK`` is set: only to see that benchmarks work."""
    return min(n, 2) if os.environ.get("LLMAAS_BENCH_QUICK") else n


def quartiles(values: NDArray[np.float64] | Sequence[float]) -> str:
    """Median, and the quartiles around it."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:.4g} [{low:.4g} {high:.4g}]"


def compare(
    benchmark: Any, ours: Step, vanilla: Step, *, before: Step = lambda: None, rounds: int = 20
) -> None:
    """Time both with pytest-benchmark: its table shows ours, ``extra_info`` has the comparison.

    That is medians and quartiles in milliseconds, the speed-up (median of the pairs' ratios) with
    its bootstrapped 95 % interval, and the process's peak memory.

    Args:
        benchmark: The fixture.
        ours: What is measured.
        vanilla: What it is compared with, in the same round.
        before: Puts things back before either; not timed.
        rounds: Pairs.
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
