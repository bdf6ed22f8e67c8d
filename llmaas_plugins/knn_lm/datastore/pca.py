"""Principal components of the keys: fewer numbers a key to scan, and less memory.

Products of matrices keep forks waiting (see ``distances``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import forks

__all__ = ["Basis", "fit_basis"]

_SAMPLE = 20_000
"""Keys that a basis is fitted on; more keys hardly change their covariance."""

Floats = NDArray[np.float32]
Keys = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Orthonormal directions, in order of decreasing variance of the keys.

    Attributes:
        mean: Mean of the keys, shape (n_embd,).
        axes: Directions, shape (n_dims, n_embd).
    """

    mean: Floats
    axes: Floats

    def project(self, keys: Floats) -> Floats:
        """Return the coordinates of one key or of many keys.

        A single key is projected without BLAS, whose threads would wait for more work on the
        processors that generate.
        """
        if keys.ndim == 1:
            return np.einsum("ij,j->i", self.axes, keys - self.mean, dtype=np.float32)
        with forks.postponed():
            return np.matmul(keys - self.mean, self.axes.T, dtype=np.float32)


def fit_basis(keys: Keys, n_dims: int, seed: int = 0) -> Basis:
    """Return the ``n_dims`` directions that keep most of the variance of ``keys``.

    Raises:
        ValueError: There are no keys, or fewer dimensions than ``n_dims``.
    """
    n, n_embd = keys.shape
    if not (0 < n_dims <= n_embd and n):
        raise ValueError(f"cannot fit {n_dims} directions to {n} keys in {n_embd} dimensions")
    rows = np.random.default_rng(seed).choice(n, min(n, _SAMPLE), replace=False)
    sample = keys[np.sort(rows)].astype(np.float32)
    mean = sample.mean(axis=0, dtype=np.float64)
    sample -= mean.astype(np.float32)
    with forks.postponed():
        _, vectors = np.linalg.eigh(sample.T @ sample)  # smallest first
    axes = np.ascontiguousarray(vectors[:, : -n_dims - 1 : -1].T, np.float32)
    return Basis(mean.astype(np.float32), axes)
