"""Ours against vanilla in one run: in turn, alternating which goes first, many times."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llmaas_plugins.demo.interval import median_interval

__all__ = ["compare"]

Step = Callable[[], object]


def compare(
    benchmark: Any, ours: Step, vanilla: Step, *, before: Step = lambda: None, rounds: int = 20
) -> None:
    """Time both with pytest-benchmark: its table shows ours, ``extra_info`` has the comparison.

    That is medians in milliseconds, the speed-up (median of the pairs' ratios) with its
    bootstrapped 95 % interval, and the process's peak memory.

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
        lambda: ours_s.append(_seconds(ours)), setup=setup, teardown=teardown, rounds=rounds
    )
    ratios = np.array(vanilla_s) / np.array(ours_s)
    median, low, high = median_interval(ratios)
    benchmark.extra_info.update(
        {
            "ours_ms": 1e3 * float(np.median(ours_s)),
            "vanilla_ms": 1e3 * float(np.median(vanilla_s)),
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
