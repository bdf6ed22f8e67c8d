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
    """Return the values that fall in no row and no column and have the least squared distance.

    Dykstra's algorithm projects on the rows' condition and the columns' in turn.

    Args:
        values: Values of equal weight; ``(n_rows, n_columns)``.
    """
    found = values.astype(np.float64)
    left_rows, left_columns = np.zeros_like(found), np.zeros_like(found)
    for _ in range(_N_ROUNDS):
        by_rows = _rising_rows(found + left_rows)
        left_rows += found - by_rows
        by_columns = _rising_rows((by_rows + left_columns).T).T
        left_columns += by_rows - by_columns
        is_done = bool(np.abs(by_columns - found).max(initial=0.0) < _CLOSE)
        found = by_columns
        if is_done:
            break
    # rounding, and an early end, may leave tiny falls
    return np.maximum.accumulate(np.maximum.accumulate(found, axis=0), axis=1)


def _rising_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([rising(row, np.ones(len(row))) for row in values])
