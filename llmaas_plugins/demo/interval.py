"""Confidence interval of a median."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["median_interval"]

_N_RESAMPLES = 4000


def median_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median and the bounds of its bootstrapped 95 % confidence interval."""
    picks = np.random.default_rng(0).integers(0, len(values), (_N_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
