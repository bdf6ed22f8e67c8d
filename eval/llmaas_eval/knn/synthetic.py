"""Synthetic keys, whose variance by direction is roughly that of hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["clustered"]

_N_CLUSTERS, _N_A_PART = 500, 20_000


def clustered(n: int, n_embd: int, seed: int = 0) -> Iterator[NDArray[np.float32]]:
    """Yield ``n`` keys of ``n_embd`` numbers in clusters, some at a time."""
    rng = np.random.default_rng(seed)
    spread = (1 + np.arange(n_embd, dtype=np.float32)) ** -0.8
    centers = rng.standard_normal((_N_CLUSTERS, n_embd), dtype=np.float32)
    for start in range(0, n, _N_A_PART):
        shape = min(_N_A_PART, n - start), n_embd
        noise = rng.standard_normal(shape, dtype=np.float32)
        yield (centers[rng.integers(0, _N_CLUSTERS, shape[0])] + np.float32(0.6) * noise) * spread
