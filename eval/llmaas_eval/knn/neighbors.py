"""Exact nearest neighbors by NumPy: many queries in many subsets of the same pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Found", "search"]

_N_DISTANCES = 1 << 24
"""Distances held in memory at a time: 64 MiB."""
_SAMPLED = 8
"""One distance in this many is sampled, for a bound beyond which no distance can be needed."""


class Found(NamedTuple):
    """Neighbors of each query, nearest first; shape ``(n_queries, k)`` each.

    Attributes:
        distances: Squared Euclidean distances.
        rows: Row numbers of the pairs.
    """

    distances: NDArray[np.float32]
    rows: NDArray[np.int32]


def search(
    queries: NDArray[np.float16],
    keys: NDArray[np.float16],
    subsets: Sequence[NDArray[np.integer]],
    k: int = 100,
) -> list[Found]:
    """Find the ``k`` nearest neighbors in each of ``subsets``, which are row numbers of ``keys``.

    Every distance is computed once in F32, however many subsets there are.

    Raises:
        ValueError: A subset has fewer than ``k`` rows.
    """
    members = [_Members(rows, len(keys), k) for rows in subsets]
    wide = keys.astype(np.float32)
    norms = np.einsum("ij,ij->i", wide, wide)
    n_block = max(1, _N_DISTANCES // len(keys))
    blocks: list[list[Found]] = []
    for start in range(0, len(queries), n_block):
        block = queries[start : start + n_block].astype(np.float32)
        distances = block @ wide.T
        distances *= -2
        distances += norms
        distances += np.einsum("ij,ij->i", block, block)[:, None]
        blocks.append([some.nearest(distances) for some in members])
    return [
        Found(*(np.concatenate(parts) for parts in zip(*founds, strict=True)))
        for founds in zip(*blocks, strict=True)
    ]


class _Members:
    """A subset of the columns of the distance matrix."""

    def __init__(self, rows: NDArray[np.integer], n: int, k: int) -> None:
        if len(rows) < k:
            raise ValueError(f"a subset has {len(rows)} pairs, expected at least {k}")
        self._k = k
        self._is_member = np.zeros(n, np.bool_)
        self._is_member[rows] = True
        self._sample = np.random.default_rng(0).permutation(rows)[: max(k, len(rows) // _SAMPLED)]

    def nearest(self, distances: NDArray[np.float32]) -> Found:
        """Return the nearest members; sort only those within the k-th distance of a sample."""
        last = np.partition(distances[:, self._sample], self._k - 1, axis=1)[:, self._k - 1]
        is_near = distances <= last[:, None]
        is_near &= self._is_member
        query, column = np.nonzero(is_near)
        found = distances[query, column]
        order = np.lexsort((found, query))
        starts = np.searchsorted(query, np.arange(len(distances)))
        chosen = order[starts[:, None] + np.arange(self._k)]
        return Found(np.maximum(found[chosen], 0), column[chosen].astype(np.int32))
