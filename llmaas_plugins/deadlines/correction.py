"""Measured times over predicted ones, to follow a machine that is busy, throttled or faster."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["Correction", "Factor"]

_N_KEPT = 8
_N_LEAST = 3
"""Fewest ratios that say how much times vary."""
_MARGIN = 1.1
"""Share by which times may exceed predictions before enough of them were compared."""
_LEAST, _MOST = 1e-3, 1e3


class Factor(NamedTuple):
    """Numbers to multiply a predicted time with.

    Attributes:
        middle: Factor for the time to expect.
        high: Factor for a time that is rarely exceeded.
    """

    middle: float = 1.0
    high: float = _MARGIN


class Correction:
    """Ratios of the last requests. Older ones do not count, so a change is followed in eight."""

    def __init__(self) -> None:
        """Start without ratios."""
        self._ratios: deque[float] = deque(maxlen=_N_KEPT)

    def add(self, measured_s: float, predicted_s: float) -> None:
        """Record a request; ``predicted_s`` is the prediction without a factor."""
        if predicted_s > 0:
            self._ratios.append(min(max(measured_s / predicted_s, _LEAST), _MOST))

    def factor(self) -> Factor:
        """Return the median of the ratios, and the second largest, or the largest of a few."""
        ratios = sorted(self._ratios)
        if not ratios:
            return Factor()
        middle = statistics.median(ratios)
        if len(ratios) < _N_LEAST:
            return Factor(middle, _MARGIN * ratios[-1])
        return Factor(middle, max(ratios[-2] if len(ratios) == _N_KEPT else ratios[-1], middle))
