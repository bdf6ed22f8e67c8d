"""Baselines for selection (§5.1): random pairs, and greedy merging."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.selection.algorithms import Selection

__all__ = ["merge", "random_pairs"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_BLOCK = 512


def random_pairs(n: int, size: int, seed: int = 0) -> Selection:
    """Select ``size`` of ``n`` pairs uniformly at random."""
    picks = np.random.default_rng(seed).choice(n, min(size, n), replace=False)
    return Selection(np.sort(picks), np.ones(len(picks), np.float32))


def merge(
    keys: Floats,
    values: Ints,
    size: int,
    *,
    neighbors: int = 100,
    progress: Callable[[int], None] = lambda _n: None,
) -> Selection:
    """Select pairs by greedy merging (He et al., 2021): a pair absorbs similar pairs.

    Visit the pairs in order. Each remaining pair absorbs those of its ``neighbors`` nearest
    pairs that have the same value and remain, and adds their weights to its own. Keep the ``size``
    heaviest pairs. The time is quadratic in the number of pairs.

    Args:
        keys: Keys, shape (n, d).
        values: Targets, shape (n,).
        size: Most pairs to keep.
        neighbors: Nearest pairs considered for each pair.
        progress: Called after each block with the number of pairs in the block.
    """
    n = len(values)
    weights = np.ones(n, np.float32)
    is_gone = np.zeros(n, np.bool_)
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values, side="left")
    last = np.searchsorted(values[order], values, side="right")
    k = min(neighbors, n - 1)
    for start in range(0, n, _BLOCK):
        block = np.arange(start, min(n, start + _BLOCK))
        distances = squared_distances(keys[block], keys)
        distances[np.arange(len(block)), block] = np.inf
        farthest = np.partition(distances, k - 1, axis=1)[:, k - 1] if k else None
        for row, i in enumerate(block.tolist()):
            if farthest is not None and not is_gone[i]:
                alike = order[first[i] : last[i]]
                taken = alike[(distances[row, alike] <= farthest[row]) & ~is_gone[alike]]
                taken = taken[taken != i]
                weights[i] += weights[taken].sum()
                is_gone[taken] = True
        progress(len(block))
    left = np.flatnonzero(~is_gone)
    kept = np.sort(left[np.argsort(-weights[left], kind="stable")[:size]])
    return Selection(kept, weights[kept])
