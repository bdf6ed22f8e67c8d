"""Share the values that a token leaves out among activations, where that costs least.

A sparsity is the share of all channels' weights that are left out. ActiveFlow leaves out the same
share of each activation. But activations differ: most values of a gated MLP's neurons are nearly
zero. So each gets its own share (as TEAL does, Liu et al. 2024, Algorithm 1, within each block).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.operands import Operand

__all__ = [
    "GRID",
    "SPARSITIES",
    "Share",
    "Shares",
    "at_sparsity",
    "cheapest_shares",
    "equal_share",
    "is_share",
    "weight_counts",
]

SPARSITIES = tuple(n / 20 for n in range(1, 20))
"""Sparsities with known thresholds."""
GRID = np.arange(96) / 100
"""Shares of an activation's values for which the growth of the loss is measured."""

Share = NDArray[np.float32]
"""Share of an activation's values that is left out at each of ``SPARSITIES``; ascending."""
Shares = Mapping[Operand, Share]


def equal_share() -> Share:
    """Return the share of each activation in which all have the same."""
    return np.array(SPARSITIES, np.float32)


def at_sparsity(values: NDArray[np.float32], sparsity: float) -> float:
    """Interpolate a number that is known at each of ``SPARSITIES``; it is 0 at sparsity 0.

    Raises:
        ValueError: The sparsity is not from 0 to 0.95.
    """
    if not 0 <= sparsity <= SPARSITIES[-1]:
        raise ValueError(f"sparsity is {sparsity}, expected 0 to {SPARSITIES[-1]}")
    return float(np.interp(sparsity, (0.0, *SPARSITIES), (0.0, *values)))


def is_share(values: NDArray[np.float32]) -> bool:
    """Return whether an array can be a share."""
    is_usable = values.shape == (len(SPARSITIES),) and np.isfinite(values).all()
    return bool(
        is_usable and values[0] >= 0 and values[-1] <= GRID[-1] and (np.diff(values) >= 0).all()
    )


def weight_counts(
    operands: Iterable[Operand], tensors: Mapping[str, TensorInfo]
) -> dict[Operand, int]:
    """Return how many weights are multiplied by each activation."""
    return {
        operand: sum(tensors[name].shape[0] * tensors[name].shape[1] for name in operand.weights)
        for operand in operands
    }


def cheapest_shares(
    growth: Mapping[Operand, NDArray[np.float64]], n_weights: Mapping[Operand, int]
) -> Shares:
    """Return the shares at which the sum of the growths is least.

    Steps of a hundredth are taken in the order of the loss that they add for each weight that they
    leave out. A step never comes before an earlier one of the same activation.

    Args:
        growth: Growth of the loss at each share of ``GRID``, by activation.
        n_weights: Weights that are multiplied by each activation.
    """
    operands = list(growth)
    slopes = np.concatenate([_slopes(growth[one], n_weights[one]) for one in operands])
    order = np.argsort(slopes, kind="stable")
    owner = np.repeat(np.arange(len(operands)), len(GRID) - 1)[order]
    weights = np.array([n_weights[one] for one in operands], np.float64)
    left_out = np.cumsum(weights[owner]) * (GRID[1] - GRID[0]) / weights.sum()
    n_steps = np.searchsorted(left_out, np.array(SPARSITIES) - _ROUNDING) + 1
    counts = np.stack([np.bincount(owner[:n], minlength=len(operands)) for n in n_steps])
    return {
        one: GRID[np.minimum(counts[:, i], len(GRID) - 1)].astype(np.float32)
        for i, one in enumerate(operands)
    }


# -- inside --------------------------------------------------------------------------------------

_ROUNDING = 1e-9


def _slopes(growth: NDArray[np.float64], n_weights: int) -> NDArray[np.float64]:
    """Return the added loss of each step for each weight; later steps cost no less."""
    return np.maximum.accumulate(np.diff(growth)) / n_weights
