"""Loading in three stages that overlap: read (and verify), decode, hand to the engine.

LLMS Fig. 8 without recompute: while the engine takes one segment's blob, a thread decodes the next
one into the other buffer, and the I/O thread reads the ones after that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import CodecError
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.staging import Staging
from llmaas_plugins.kv_chunks.store import ChunkStore
from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["Segment", "Workers", "load_segments"]

_READ_AHEAD = 3
_INLINE = 2


class Workers:
    """The plugin's threads: demand reads and swap-out writes do not wait for each other."""

    def __init__(self) -> None:
        """No thread starts before its first job."""
        self.read = ThreadPoolExecutor(1, thread_name_prefix="llmaas-kv-read")
        self.decode = ThreadPoolExecutor(1, thread_name_prefix="llmaas-kv-decode")
        self.write = ThreadPoolExecutor(1, thread_name_prefix="llmaas-kv-write")

    def close(self) -> None:
        """Finish what is queued."""
        for pool in (self.read, self.decode, self.write):
            pool.shutdown(wait=True)


class Segment(NamedTuple):
    """Cells ready for the engine.

    Attributes:
        blob: What ``llama_state_seq_set_data`` takes; valid until the segment after the next.
        n_tokens: Tokens in it.
        is_whole: False when a chunk was missing or damaged: this is the last segment then.
    """

    blob: NDArray[np.uint8]
    n_tokens: int
    is_whole: bool


class _Loader:
    def __init__(self, store: ChunkStore, staging: Staging, geometry: KVGeometry) -> None:
        self._store = store
        self._staging = staging
        self._geometry = geometry

    def decode(self, i: int, chunks: Sequence[Chunk], addresses: list[int], start: int) -> Segment:
        """Decode the fetched leading ``chunks`` of segment ``i`` for positions from ``start`` on."""
        ready = chunks[: len(addresses)]
        try:
            n_tokens = [chunk.n_tokens for chunk in ready]
            n_cells = sum(n_tokens)
            if not n_cells:
                return Segment(self._staging.buffer(i)[:0], 0, is_whole=False)
            blob = self._staging.buffer(i)[: _native.blob_size(self._geometry, n_cells)]
            _native.blob_init(self._geometry, blob, list(range(start, start + n_cells)))
            firsts = np.cumsum([0, *n_tokens[:-1]]).tolist()
            sizes = [chunk.size for chunk in ready]
            _native.chunks_decode_at(self._geometry, addresses, sizes, firsts, blob, n_cells)
        except CodecError:
            for chunk in ready:
                self._store.fault(chunk)
            return Segment(self._staging.buffer(i)[:0], 0, is_whole=False)
        finally:
            self._store.release(ready)
        return Segment(blob, n_cells, is_whole=len(ready) == len(chunks))


def load_segments(
    store: ChunkStore,
    staging: Staging,
    workers: Workers,
    geometry: KVGeometry,
    chunks: Sequence[Chunk],
    start: int,
) -> Generator[Segment]:
    """Segments of ``chunks`` for positions from ``start`` on, each ready as it is yielded."""
    step = staging.chunks(geometry)
    parts = [chunks[i : i + step] for i in range(0, len(chunks), step)]
    starts = np.cumsum([start, *(sum(c.n_tokens for c in part) for part in parts)]).tolist()
    loader = _Loader(store, staging, geometry)
    if len(parts) <= _INLINE and all(chunk.ram >= 0 for chunk in chunks):
        for i, part in enumerate(parts):  # threads would cost more than they hide
            segment = loader.decode(i, part, store.fetch(part), starts[i])
            yield segment
            if not segment.is_whole:
                return
        return

    reads: dict[int, Future[list[int]]] = {}

    def read_ahead(i: int) -> None:
        for k in range(i, min(i + _READ_AHEAD, len(parts))):
            if k not in reads:
                reads[k] = workers.read.submit(store.fetch, parts[k])

    def decode(i: int, fetched: Future[list[int]]) -> Segment:
        return loader.decode(i, parts[i], fetched.result(), starts[i])

    read_ahead(0)
    decoding = workers.decode.submit(decode, 0, reads.pop(0))
    try:
        for i in range(len(parts)):
            segment = decoding.result()
            if segment.is_whole and i + 1 < len(parts):
                read_ahead(i + 1)
                decoding = workers.decode.submit(decode, i + 1, reads.pop(i + 1))
            yield segment
            if not segment.is_whole:
                return
    finally:
        decoding.result()
        for i, fetched in reads.items():
            store.release(parts[i][: len(fetched.result())])
