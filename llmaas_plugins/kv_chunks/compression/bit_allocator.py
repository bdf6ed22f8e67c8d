"""Choose and apply the bits of a context's chunks at the end of a request (LLMS §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins import _native
from llmaas_plugins._native import Codec, KVGeometry
from llmaas_plugins.kv_chunks.compression.tolerance import allocate_bits, densities
from llmaas_plugins.kv_chunks.store.chunk_ids import ChunkId
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore

__all__ = ["AttentionSums", "BitAllocator"]

AttentionSums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Summed attention and score counts of each chunk of a context since the last request; two arrays
of shape ``(n,)``."""


class BitAllocator:
    """Choice of bits for chunks. A stored chunk's bits can only fall, never rise."""

    def __init__(self, store: ChunkStore, levels: Sequence[int], ratio: float) -> None:
        """Choose among ``levels`` so that the mean is at most ``8 * ratio`` bits."""
        self._store = store
        self._levels = levels
        self._ratio = ratio

    def choose(self, ids: Sequence[ChunkId], attention: AttentionSums) -> NDArray[np.int64]:
        """Return each chunk's bits, chosen by all attention so far; shape ``(n,)``."""
        known = self._store.find(ids)
        sums, counts = attention[0].copy(), attention[1].copy()
        max_bits = np.full(len(ids), max(self._levels), dtype=np.int64)
        for i, chunk in enumerate(known):
            if chunk is not None:
                sums[i] += chunk.attention
                counts[i] += chunk.n_scores
                if not chunk.is_ghost:
                    max_bits[i] = chunk.bits or max_bits[i]
        return allocate_bits(densities(sums, counts), self._levels, self._ratio, max_bits)

    def apply(
        self,
        ids: Sequence[ChunkId],
        bits: NDArray[np.int64],
        attention: AttentionSums,
        geometry: KVGeometry,
    ) -> None:
        """Cut chunks that have more bits than chosen, and store their attention.

        Args:
            ids: Chunks of the context, all stored by now.
            bits: Chosen bits of each chunk.
            attention: Attention that the choice was based on.
            geometry: Layout of the cells.
        """

        def size(n_tokens: int, level: int) -> int:
            return _native.chunk_bound(geometry, Codec.PLANES, n_tokens, level)

        self._store.add_attention(ids, attention[0].tolist(), attention[1].tolist())
        self._store.reduce_bits(ids, bits.tolist(), size)
