"""Search for the highest arrival rate at which enough requests keep their promises.

Rates are on a grid of 10 % steps, so that all systems are measured at the same rates, with the same
arrivals. A rate is tried only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["highest", "rate_of", "step_of"]

_RATIO = 1.1
_JUMP = 4


def rate_of(step: int) -> float:
    """Return the rate of a step in requests a second; step 0 is one a second."""
    return float(_RATIO**step)


def step_of(rate: float) -> int:
    """Return the step nearest to a rate."""
    return round(math.log(rate, _RATIO))


def highest(passes: Callable[[int], bool], start: int, least: int, most: int) -> int | None:
    """Return the highest step that passes, if every step below one that passes does so, too.

    Args:
        passes: Function that tries a step.
        start: Step to try first.
        least: Lowest step to try.
        most: Highest step to try.

    Returns:
        The step, or None if even ``least`` does not pass.
    """
    start = min(max(start, least), most)
    if passes(start):
        low, high = _up(passes, start, most)
    else:
        found = _down(passes, start, least)
        if found is None:
            return None
        low, high = found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


# -- inside --------------------------------------------------------------------------------------


def _up(passes: Callable[[int], bool], low: int, most: int) -> tuple[int, int]:
    """Return a step that passes and one that does not, or the one after ``most``."""
    jump = _JUMP
    while low < most:
        high = min(low + jump, most)
        if not passes(high):
            return low, high
        low, jump = high, 2 * jump
    return low, low + 1


def _down(passes: Callable[[int], bool], high: int, least: int) -> tuple[int, int] | None:
    """Return a step that passes and one that does not; None if none passes."""
    jump = _JUMP
    while high > least:
        low = max(high - jump, least)
        if passes(low):
            return low, high
        high, jump = low, 2 * jump
    return None
