"""Number of rows that a scan must return so that the nearest pairs are among them.

It depends on the keys, because a basis that leaves much variance out ranks neighbors wrongly. It is
therefore measured, with keys of the datastore as queries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins._native import KnnCodes, knn_scan
from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.datastore.pca import Basis

__all__ = ["MOST_ROWS", "rows_per_neighbor"]

MOST_ROWS = 10.0
"""Most rows worth rescoring for each neighbor; a basis that needs more loses recall."""

_K = 100
_QUERIES = 32
_RECALL = 0.997
_PART = 8192

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


def rows_per_neighbor(codes: KnnCodes, basis: Basis | None, keys: Halves) -> float:
    """Return how many rows a scan must return for each neighbor, 1 to ``MOST_ROWS``.

    Args:
        codes: Codes of the keys.
        basis: Basis of the codes, if any.
        keys: Keys as the file will store them.
    """
    k = min(_K, len(keys))
    if k == 0:
        return 1.0
    picks = np.random.default_rng(0).choice(len(keys), min(_QUERIES, len(keys)), replace=False)
    queries = keys[picks].astype(np.float32)
    limits = _farthest(keys, queries, k)
    n_best = min(int(k * MOST_ROWS), len(keys))
    places = []
    for query, limit in zip(queries, limits, strict=True):
        rows = knn_scan(codes, query if basis is None else basis.project(query), n_best).rows
        distances = squared_distances(query[None], keys[rows].astype(np.float32))[0]
        # among keys at the same distance, any one counts as found
        found = np.flatnonzero(distances <= limit + 1e-5 * (query @ query))[:k]
        places.append(np.append(found, np.full(k - len(found), n_best)))
    return float(np.clip((np.quantile(places, _RECALL) + 1) / k, 1.0, MOST_ROWS))


def _farthest(keys: Halves, queries: Floats, k: int) -> Floats:
    """Return, for each query, the squared distance of its ``k``-th neighbor."""
    nearest = np.empty((len(queries), 0), np.float32)
    for first in range(0, len(keys), _PART):
        part = squared_distances(queries, keys[first : first + _PART].astype(np.float32))
        nearest = np.concatenate([nearest, part], axis=1)
        nearest = np.partition(nearest, min(k, nearest.shape[1]) - 1, axis=1)[:, :k]
    return nearest.max(axis=1)
