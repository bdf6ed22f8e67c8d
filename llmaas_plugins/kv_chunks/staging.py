"""The transfer buffers: a corner of the RAM tier through which cells travel, in or out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import BudgetError, forks
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.extents import page_round
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store import ChunkStore

__all__ = ["Staging"]

_SHARE = 16


class Staging:
    """A ring of buffers of one segment each, for all engines; hold ``lock`` while you use them.

    Attributes:
        lock: Whoever uses the buffers holds it.
        whole: All of them as one, shape ``(n_bytes,)``.
    """

    BUFFERS = 3

    def __init__(self, store: ChunkStore, segment_bytes: int = 4 << 20) -> None:
        """Take no space before a geometry is known.

        Args:
            store: Whose RAM tier they are a corner of.
            segment_bytes: Bytes of cells that travel at a time.
        """
        self.lock = forks.lock()
        self.whole: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._store = store
        self._segment_bytes = segment_bytes

    def segment_chunks(self, geometry: KVGeometry) -> int:
        """Chunks in a segment: of the size that is wanted, a 16th of the RAM budget, or one chunk.

        The first engine, and each one with larger chunks, takes the buffers' space.

        Raises:
            BudgetError: The budget has no room for segments of one chunk.
        """
        one = _native.blob_size(geometry, CHUNK_TOKENS)
        each = _native.blob_size(geometry, 2 * CHUNK_TOKENS) - one
        most = min(self._segment_bytes, self._store.ram_capacity // _SHARE)
        n_chunks = max(1, 1 + (most - one) // each)
        with self.lock:
            self._grow(self.BUFFERS * page_round(one + (n_chunks - 1) * each))
        return n_chunks

    def buffer(self, i: int) -> NDArray[np.uint8]:
        """Buffer ``i`` of the ring, shape ``(n_bytes / BUFFERS,)``."""
        n_bytes = len(self.whole) // self.BUFFERS
        start = i % self.BUFFERS * n_bytes
        return self.whole[start : start + n_bytes]

    def _grow(self, n_bytes: int) -> None:
        if n_bytes <= len(self.whole):
            return
        area = self._store.set_aside(n_bytes)
        if area is None:
            raise BudgetError(
                f"this model needs {n_bytes} bytes of transfer buffers, and the RAM tier has "
                f"{self._store.ram_capacity} in all; set plugins.kv_chunks.ram_budget to at least "
                f"{_SHARE * n_bytes // self.BUFFERS}"
            )
        if len(self.whole):
            self._store.give_back(self.whole)
        self.whole = area
