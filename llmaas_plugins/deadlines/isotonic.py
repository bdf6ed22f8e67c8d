"""Isotonic regression: the nearest values, by least squares, that never fall."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["rising", "rising_grid"]

_N_ROUNDS = 200
_CLOSE = 1e-9


def rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values that never fall and have the least weighted squared distance.

    This is the algorithm of pool adjacent violators.

    Args:
        values: Values in order; ``(n,)``.
        weights: Weight of each value, above 0; ``(n,)``.
    """
    means, sums, sizes = list[float](), list[float](), list[int]()
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, size = value, weight, 1
        while means and means[-1] >= mean:
            mean = (mean * total + means[-1] * sums[-1]) / (total + sums[-1])
            total, size = total + sums.pop(), size + sizes.pop()
            means.pop()
        means.append(mean)
        sums.append(total)
        sizes.append(size)
    return np.repeat(np.array(means, np.float64), np.array(sizes, np.intp))


def rising_grid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values that fall along no axis and have the least squared distance.

    Dykstra's algorithm projects on the condition of each axis in turn.

    Args:
        values: Values of equal weight, on a grid of one axis or more.
    """
    found = values.astype(np.float64)
    left = [np.zeros_like(found) for _ in range(found.ndim)]
    for _ in range(_N_ROUNDS):
        before = found
        for axis in reversed(range(found.ndim)):
            asked = found + left[axis]
            found = _rising_along(asked, axis)
            left[axis] = asked - found
        if np.abs(found - before).max(initial=0.0) < _CLOSE:
            break
    for axis in range(found.ndim):  # rounding, and an early end, may leave tiny falls
        found = np.maximum.accumulate(found, axis=axis)
    return found


def _rising_along(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return the nearest values that never fall along one axis.

    Each one is the largest mean from any value before it, of those means that are least up to any
    value behind it.
    """
    rows = np.moveaxis(values, axis, -1)
    n = rows.shape[-1]
    sums = np.concatenate([np.zeros((*rows.shape[:-1], 1)), rows.cumsum(axis=-1)], axis=-1)
    first, last = np.indices((n, n))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums[..., None, 1:] - sums[..., :-1, None]) / (last - first + 1)
    means = np.where(first <= last, means, np.inf)
    least = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    found = np.where(first <= last, least, -np.inf).max(axis=-2)
    return np.moveaxis(found, -1, axis)
