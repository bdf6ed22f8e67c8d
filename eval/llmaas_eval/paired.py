"""Ours against vanilla in one run: in turn, alternating which goes first, many times."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["compare", "median_interval", "peak_rss_mib"]

Step = Callable[[], object]
_N_RESAMPLES = 4000


def compare(
    benchmark: Any, ours: Step, vanilla: Step, *, before: Step = lambda: None, rounds: int = 20
) -> dict[str, float]:
    """Time both with pytest-benchmark: its table shows ours, ``extra_info`` has the comparison.

    Args:
        benchmark: The fixture.
        ours: What is measured.
        vanilla: What it is compared with, in the same round.
        before: Puts things back before either; not timed.
        rounds: Pairs.

    Returns:
        Medians in milliseconds, and the speed-up (median of the pairs' ratios) with its
        bootstrapped 95 % interval.
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
        lambda: ours_s.append(_seconds(ours)), setup=setup, teardown=teardown, rounds=rounds
    )
    ratios = np.array(vanilla_s) / np.array(ours_s)
    median, low, high = median_interval(ratios)
    figures = {
        "ours_ms": 1e3 * float(np.median(ours_s)),
        "vanilla_ms": 1e3 * float(np.median(vanilla_s)),
        "speedup": median,
        "speedup_low": low,
        "speedup_high": high,
        "peak_rss_mib": peak_rss_mib(),
    }
    benchmark.extra_info.update(figures)
    return figures


def median_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, and the bootstrapped 95 % interval around it."""
    picks = np.random.default_rng(0).integers(0, len(values), (_N_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def peak_rss_mib() -> float:
    """Most memory this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
