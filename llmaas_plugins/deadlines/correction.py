"""Measured times against predicted ones, to follow a machine that is busy, throttled or faster."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import numpy as np

__all__ = ["Correction", "Fit"]

_N_KEPT = 10
_N_LEAST = 3
"""Fewest requests that say how much times vary."""
_FIRST_MARGIN, _MARGIN = 0.1, 0.03
"""Least share by which times may exceed predictions, before and after so many requests."""
_N_DEVIATIONS = 2.5
_SIGMA = 1.4826
"""Standard deviation of a normal distribution over the median of absolute deviations."""
_TRUST = 0.05
"""Weight of a slope of 1, beside the squares of relative errors."""
_LEAST_SLOPE = 1e-3
_LEAST_SHARE = 0.3
"""Least share of the slope's time that is left beside a negative offset."""
_BETTER = 0.5
"""Share of the squared errors below which a negative offset is believed."""
_LEAST_S, _MOST_S = 1e-9, 1e6


class Fit(NamedTuple):
    """Line from times of the tables to real ones.

    Attributes:
        offset_s: Seconds that every level takes, such as those of a grammar.
        slope: Factor of the tables' times, such as that of a busy machine.
        margin: Factor that times of this line rarely exceed.
    """

    offset_s: float = 0.0
    slope: float = 1.0
    margin: float = 1 + _FIRST_MARGIN

    def expected_s(self, table_s: float) -> float:
        """Return the time to expect for a time of the tables."""
        return max(self.offset_s / self.slope + table_s, _LEAST_SHARE * table_s) * self.slope

    def most_s(self, table_s: float) -> float:
        """Return a time that is rarely exceeded."""
        return self.margin * self.expected_s(table_s)


class Correction:
    """Times of the last ten requests that count. So a change is followed in ten of them.

    As soon as a request had the engine to itself, only such requests count. After ten in a row that
    shared it, the last ten of these count instead, until the next request has it to itself.

    Errors count relative to the measured time, so that single slow requests hardly matter. As long
    as all requests had about the same time by the tables, the line has a slope of 1: a wider level
    is then tried again after a busy time, and shows which of offset and slope it was.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._alone: deque[tuple[float, float]] = deque(maxlen=_N_KEPT)
        self._shared: deque[tuple[float, float]] = deque(maxlen=_N_KEPT)  # since the last one alone

    def __bool__(self) -> bool:
        """Return whether any request was recorded."""
        return bool(self._times)

    def add(self, measured_s: float, table_s: float, *, is_alone: bool = True) -> None:
        """Record a request.

        Args:
            measured_s: Seconds that it took.
            table_s: Seconds that it takes by the tables.
            is_alone: Whether it had the engine to itself. Tokens in batches with others', or after
                an interruption, are slower.
        """
        time = _bounded(table_s), _bounded(measured_s)
        if not is_alone:
            self._shared.append(time)
            return
        if len(self._shared) == _N_KEPT:
            self._alone.clear()  # they are from before those ten
        self._shared.clear()
        self._alone.append(time)

    def fit(self) -> Fit:
        """Return the line through the requests."""
        times = self._times
        if not times:
            return Fit()
        tables, measured = np.array(times).T
        offset, slope = _line(tables, measured)
        if len(times) < _N_LEAST:
            return Fit(offset, slope)
        expected = [Fit(offset, slope).expected_s(table) for table in tables.tolist()]
        errors = np.abs(measured / np.array(expected) - 1)
        deviation = _SIGMA * statistics.median(errors.tolist())
        return Fit(offset, slope, 1 + max(_N_DEVIATIONS * deviation, _MARGIN))

    @property
    def _times(self) -> deque[tuple[float, float]]:
        """Times that count: seconds by the tables, and measured ones."""
        are_alone = self._alone and len(self._shared) < _N_KEPT
        return self._alone if are_alone else self._shared


# -- inside --------------------------------------------------------------------------------------


def _bounded(seconds: float) -> float:
    return min(max(seconds, _LEAST_S), _MOST_S)


def _line(tables: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Return offset and slope with the least relative errors.

    The offset is negative only if the line fits much better so: if narrow levels are faster, beside
    wide ones, than the tables say.
    """
    weights = measured**-2.0
    mean_t, mean_m = (np.average(values, weights=weights) for values in (tables, measured))
    spread = float(weights @ (tables - mean_t) ** 2)
    slope = (float(weights @ ((tables - mean_t) * (measured - mean_m))) + _TRUST) / (
        spread + _TRUST
    )
    slope = max(slope, _LEAST_SLOPE)
    offset = float(mean_m - slope * mean_t)
    through_zero = float(weights @ (tables * measured) / (weights @ tables**2))
    errors, errors_at_zero = (
        float(weights @ (measured - a - b * tables) ** 2)
        for a, b in ((offset, slope), (0.0, through_zero))
    )
    is_poor = errors_at_zero > len(tables) * _MARGIN**2
    is_line = offset >= 0 or (is_poor and errors < _BETTER * errors_at_zero)
    return (offset, slope) if is_line else (0.0, through_zero)
