"""Distances between keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["squared_distances"]

Floats = npt.NDArray[np.float32]


def squared_distances(left: Floats, right: Floats) -> Floats:
    """Return the squared distances of all pairs of rows, shape (len(left), len(right))."""
    sizes = np.einsum("ij,ij->i", left, left)[:, None] + np.einsum("ij,ij->i", right, right)
    return np.maximum(sizes - 2 * (left @ right.T), 0)
