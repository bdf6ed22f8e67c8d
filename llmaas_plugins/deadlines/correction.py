"""Measured times over predicted ones, to follow a machine that is busy, throttled or faster."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["Correction", "Factor"]

_N_KEPT = 10
_N_LEAST = 3
"""Fewest ratios that say how much times vary."""
_FIRST_MARGIN, _MARGIN = 0.1, 0.03
"""Least share by which times may exceed predictions, before and after so many were compared."""
_N_DEVIATIONS = 2.5
_SIGMA = 1.4826
"""Standard deviation of a normal distribution over the median of absolute deviations."""
_LEAST, _MOST = 1e-3, 1e3


class Factor(NamedTuple):
    """Numbers to multiply a predicted time with.

    Attributes:
        middle: Factor for the time to expect.
        high: Factor for a time that is rarely exceeded.
    """

    middle: float = 1.0
    high: float = 1 + _FIRST_MARGIN


class Correction:
    """Ratios of the last ten requests. Older ones do not count, so a change is followed in ten."""

    def __init__(self) -> None:
        """Start without ratios."""
        self._ratios: deque[float] = deque(maxlen=_N_KEPT)

    def add(self, measured_s: float, predicted_s: float) -> None:
        """Record a request; ``predicted_s`` is the prediction without a factor."""
        if predicted_s > 0:
            self._ratios.append(min(max(measured_s / predicted_s, _LEAST), _MOST))

    def factor(self) -> Factor:
        """Return the median of the ratios, and one that few exceed, judged by their spread.

        The spread is the median of absolute deviations, so single outliers do not count.
        """
        ratios = self._ratios
        if not ratios:
            return Factor()
        middle = statistics.median(ratios)
        if len(ratios) < _N_LEAST:
            return Factor(middle, (1 + _FIRST_MARGIN) * max(ratios))
        deviation = _SIGMA * statistics.median(abs(ratio - middle) for ratio in ratios)
        return Factor(middle, middle + max(_N_DEVIATIONS * deviation, _MARGIN * middle))
