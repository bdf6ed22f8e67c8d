"""An approximate index, built with faiss (an optional extra), for more than a million pairs.

Below a million pairs an exact scan of codes is as fast and needs no build. The index is built from
the datastore's keys each time the file is opened and lives only in memory. Forgotten pairs are
therefore in no other file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, forks

__all__ = ["FaissIndex"]

_TRAINED_ON = 64
"""Keys per list from which the lists' centers are learned."""
_LEAST_PER_LIST = 39
"""Keys per list below which faiss warns that it cannot learn the lists."""
_VISITED = 0.05
"""Share of the lists that one search visits."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class FaissIndex:
    """Inverted lists of byte codes (``IndexIVFScalarQuantizer``)."""

    def __init__(self, n: int, n_dims: int, parts: Iterator[Floats]) -> None:
        """Learn the lists from the first keys, then add all keys.

        Args:
            n: Number of keys.
            n_dims: Numbers in each key.
            parts: The keys, in parts of shape (rows, n_dims).

        Raises:
            ConfigError: faiss is not installed.
        """
        faiss = _faiss()
        n_lists = max(1, min(math.isqrt(n), n // _LEAST_PER_LIST))
        quantizer = faiss.IndexFlatL2(n_dims)
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(quantizer, n_dims, n_lists, kind, faiss.METRIC_L2)
        first: list[Floats] = []
        while sum(map(len, first)) < min(n, _TRAINED_ON * n_lists):
            first.append(next(parts))
        index.train(np.concatenate(first))
        for part in itertools.chain(first, parts):
            index.add(part)
        index.nprobe = max(1, math.ceil(_VISITED * n_lists))
        self._index: Any = index
        self.n_bytes = n * (n_dims + 8) + 4 * n_lists * n_dims

    def nearest(self, query: Floats, n: int, within: range) -> Ints:
        """Return about the ``n`` nearest rows in ``within``; fewer if few are in the lists."""
        faiss = _faiss()
        selector = faiss.IDSelectorRange(within.start, within.stop)
        how = faiss.SearchParametersIVF(nprobe=self._index.nprobe, sel=selector)
        _, (rows,) = self._index.search(query[None], n, params=how)
        return rows[rows >= 0].astype(np.int32)


def _faiss() -> Any:
    try:
        with forks.postponed():  # a child could not finish another thread's import
            import faiss
    except ImportError as error:
        raise ConfigError(
            'plugins.knn_lm.index = "faiss" needs faiss, which is not installed. '
            "Run `pip install 'llmaas-plugins[faiss]'`, or use \"scan\"."
        ) from error
    faiss.omp_set_num_threads(1)  # more threads would compete with generation for the processors
    return faiss
