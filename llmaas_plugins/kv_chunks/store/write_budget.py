"""A daily limit on bytes written to disk, because writes wear out flash memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["WriteBudget"]

_DAY_S = 86400


class WriteBudget:
    """A write budget for each day (UTC). The index keeps the day's total across restarts."""

    def __init__(self, per_day: int | None, written_on: Callable[[int], int]) -> None:
        """Start today's budget.

        Args:
            per_day: Bytes that may be written each day; None for no limit.
            written_on: Returns the bytes already written on a day, given as days since 1970.
        """
        self._per_day = math.inf if per_day is None else per_day
        self._day = _today()
        self._written = written_on(self._day)

    def remaining(self) -> float:
        """Return how many bytes may still be written today."""
        self._start_new_day()
        return self._per_day - self._written

    def spend(self, n_bytes: int) -> None:
        """Record that ``n_bytes`` were written."""
        self._start_new_day()
        self._written += n_bytes

    def written(self) -> dict[int, int]:
        """Return the bytes written today, keyed by the day's number since 1970."""
        self._start_new_day()
        return {self._day: self._written}

    def _start_new_day(self) -> None:
        today = _today()
        if today > self._day:  # if the clock goes back, no day's budget is granted twice
            self._day, self._written = today, 0


def _today() -> int:
    return int(time.time() // _DAY_S)
