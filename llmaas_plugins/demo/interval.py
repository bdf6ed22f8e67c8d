"""Bootstrapped 95 % confidence intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "interval", "median_interval", "resamples"]

_N_RESAMPLES = 4000

Values = NDArray[np.float64]


class Interval(NamedTuple):
    """A value and its bootstrapped 95 % interval."""

    value: float
    low: float
    high: float


def resamples(n: int, seed: int = 0) -> NDArray[np.int64]:
    """Return indexes of samples drawn with replacement; shape ``(n_resamples, n)``."""
    return np.random.default_rng(seed).integers(0, n, (_N_RESAMPLES, n))


def interval(value: float, replicates: Values) -> Interval:
    """Return ``value`` with the central 95 % of its replicates, one for each resample."""
    low, high = np.percentile(replicates, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def median_interval(values: Values) -> Interval:
    """Return the median of independent values."""
    replicates = np.median(values[resamples(len(values))], axis=1)
    return interval(float(np.median(values)), replicates)
