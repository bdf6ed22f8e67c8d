"""What selection is compared with (§5.1): random pairs, and greedy merging."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.objective import squared_distances
from llmaas_plugins.knn_lm.selection import Selection

__all__ = ["merge", "random_pairs"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_BLOCK = 512


def random_pairs(n: int, size: int, seed: int = 0) -> Selection:
    """``size`` of ``n`` pairs, each as likely as any other."""
    picks = np.random.default_rng(seed).choice(n, min(size, n), replace=False)
    return Selection(np.sort(picks), np.ones(len(picks), np.float32))


def merge(
    keys: Floats,
    values: Ints,
    size: int,
    *,
    neighbours: int = 100,
    progress: Callable[[int], None] = lambda _n: None,
) -> Selection:
    """Greedy merging (He et al., 2021): a pair takes in those of its neighbours with its value.

    In the order of the pairs, each that is still there takes in every one of its ``neighbours``
    nearest that has its value and is still there, and weighs as many as it stands for. The ``size``
    heaviest are kept. Quadratic in the number of pairs.

    Args:
        keys: Shape (n, d).
        values: Their targets, shape (n,).
        size: Most pairs to keep.
        neighbours: How many are looked at.
        progress: Told after each block of pairs how many it had.
    """
    n = len(values)
    weights = np.ones(n, np.float32)
    is_gone = np.zeros(n, np.bool_)
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values, side="left")
    last = np.searchsorted(values[order], values, side="right")
    k = min(neighbours, n - 1)
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
