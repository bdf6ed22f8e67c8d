"""Exact nearest neighbours by numpy: of many queries, in many subsets of the same pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Found", "search"]

_N_DISTANCES = 1 << 24
"""Kept at a time: 64 MiB."""
_SAMPLED = 8
"""One distance in so many is sorted, to know beyond which none is of use."""


class Found(NamedTuple):
    """Neighbours of each query, nearest first; shape ``(n_queries, k)`` each.

    Attributes:
        distances: Squared Euclidean.
        rows: Which pairs.
    """

    distances: NDArray[np.float32]
    rows: NDArray[np.int32]


def search(
    queries: NDArray[np.float16],
    keys: NDArray[np.float16],
    subsets: Sequence[NDArray[np.integer]],
    k: int = 100,
) -> list[Found]:
    """The ``k`` nearest neighbours in each of ``subsets``, which are rows of ``keys``.

    Every distance is computed once, in 32 bits, for however many subsets.
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
    """A subset of the columns."""

    def __init__(self, rows: NDArray[np.integer], n: int, k: int) -> None:
        if len(rows) < k:
            raise ValueError(f"a subset of {len(rows)} pairs, expected {k} at least")
        self._k = k
        self._is_member = np.zeros(n, np.bool_)
        self._is_member[rows] = True
        self._sample = np.random.default_rng(0).permutation(rows)[: max(k, len(rows) // _SAMPLED)]

    def nearest(self, distances: NDArray[np.float32]) -> Found:
        """Sort only what is no farther than the k-th of a sample."""
        last = np.partition(distances[:, self._sample], self._k - 1, axis=1)[:, self._k - 1]
        is_near = distances <= last[:, None]
        is_near &= self._is_member
        query, column = np.nonzero(is_near)
        found = distances[query, column]
        order = np.lexsort((found, query))
        starts = np.searchsorted(query, np.arange(len(distances)))
        chosen = order[starts[:, None] + np.arange(self._k)]
        return Found(np.maximum(found[chosen], 0), column[chosen].astype(np.int32))
