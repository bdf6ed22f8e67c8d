"""Sums over the recent past, in which older amounts count less and less."""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

__all__ = ["TIME_S", "RecentSums"]

TIME_S = 60.0
"""Time in which the weight of an amount falls to 1/e. It is the same for all kinds of memory, so
that sums of a short time, which are too small, are too small alike."""


class RecentSums:
    """Sums of amounts, each of which counts ``exp(-age / TIME_S)``. Use it under a lock."""

    def __init__(self, n: int) -> None:
        """Start ``n`` sums at zero."""
        self._sums = np.zeros(n)
        self._at = time.monotonic()

    def add(self, i: int | NDArray[np.int64], amount: float | NDArray[np.float64]) -> None:
        """Add an amount to sum ``i``, or amounts to several sums."""
        self._age()
        np.add.at(self._sums, i, amount)

    def now(self) -> NDArray[np.float64]:
        """Return the sums, shape ``(n,)``."""
        self._age()
        return self._sums.copy()

    def _age(self) -> None:
        now = time.monotonic()
        self._sums *= math.exp((self._at - now) / TIME_S)
        self._at = now
