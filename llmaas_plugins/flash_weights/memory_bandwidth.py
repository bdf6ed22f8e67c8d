"""Measure how fast the processors read weights in memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["memory_rate"]

_BYTES = 64 << 20
"""Bytes to read, more than the CPU caches hold."""


def memory_rate(n_threads: int, seconds: float = 0.5) -> float:
    """Return the bytes per second that ``n_threads`` threads read together.

    Products with one token do little else than read weights.
    """

    def read(_thread: int) -> float:
        part = np.ones(_BYTES // n_threads // 8, np.uint64)
        began, n_done = time.monotonic(), 0
        while n_done == 0 or time.monotonic() < began + seconds:
            part.sum()
            n_done += part.nbytes
        return n_done / (time.monotonic() - began)

    with ThreadPoolExecutor(n_threads) as pool:
        return sum(pool.map(read, range(n_threads)))
