"""How many bytes may still be written today: flash wears out by what is written to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Allowance"]

_DAY_S = 86400


class Allowance:
    """A write budget for each day of the clock, kept over restarts by the index."""

    def __init__(self, per_day: int | None, written_on: Callable[[int], int]) -> None:
        """Allow ``per_day`` bytes, or any number of them if None.

        Args:
            per_day: The budget.
            written_on: Bytes that were written on a day, by its number since 1970, before now.
        """
        self._per_day = math.inf if per_day is None else per_day
        self._day = _today()
        self._written = written_on(self._day)

    def left(self) -> float:
        """Bytes that may be written now."""
        self._turn_over()
        return self._per_day - self._written

    def spend(self, n_bytes: int) -> None:
        """So many were written."""
        self._turn_over()
        self._written += n_bytes

    def written(self) -> dict[int, int]:
        """What was written today, by the day's number."""
        self._turn_over()
        return {self._day: self._written}

    def _turn_over(self) -> None:
        today = _today()
        if today > self._day:  # a clock that goes back gives nothing for a second time
            self._day, self._written = today, 0


def _today() -> int:
    return int(time.time() // _DAY_S)
