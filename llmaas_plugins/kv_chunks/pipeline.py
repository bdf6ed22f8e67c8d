"""Loading in three stages that overlap: read (and verify), decode, hand to the engine.

LLMS Fig. 8 without recompute: while the engine takes one segment's blob, a thread decodes the next
one into the other buffer, each record of it as soon as it has arrived, and the readers fetch the
records after that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry, NativeError
from llmaas_plugins.kv_chunks.staging import Staging
from llmaas_plugins.kv_chunks.store import ChunkStore
from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["Loader", "Segment", "Workers"]

_READERS = 4
_RECORDS_AHEAD = 6


class Workers:
    """The plugin's threads: demand reads and swap-out writes do not wait for each other."""

    def __init__(self) -> None:
        """No thread starts before its first job."""
        self.read = ThreadPoolExecutor(_READERS, thread_name_prefix="llmaas-kv-read")
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


class Loader:
    """Turns stored chunks into segments for an engine whose cells have ``geometry``."""

    def __init__(
        self, store: ChunkStore, staging: Staging, workers: Workers, geometry: KVGeometry
    ) -> None:
        """Measure how much fits the staging buffers.

        Raises:
            BudgetError: Not even one chunk fits.
        """
        self._store = store
        self._staging = staging
        self._workers = workers
        self._geometry = geometry
        self._step = staging.chunks(geometry)

    def segments(self, chunks: Sequence[Chunk], start: int) -> Generator[Segment]:
        """Segments of ``chunks``, each ready as it is yielded; the last may not be whole.

        Hold ``staging.lock`` until the generator is exhausted or closed.

        Args:
            chunks: In order of position, without gaps.
            start: Position of the first chunk's first token.
        """
        if _blob_bytes(self._geometry, chunks) <= self._staging.whole.nbytes:
            yield self._load(chunks, start, self._staging.whole)  # threads would cost more
            return
        parts = [chunks[i : i + self._step] for i in range(0, len(chunks), self._step)]
        reads = _ReadAhead(self._store, self._workers.read, parts)
        submit = self._workers.decode.submit
        decoding = submit(self._decode, 0, parts[0], start, reads)
        try:
            for i in range(len(parts)):
                segment = decoding.result()
                start += segment.n_tokens
                if segment.is_whole and i + 1 < len(parts):
                    decoding = submit(self._decode, i + 1, parts[i + 1], start, reads)
                yield segment
                if not segment.is_whole:
                    return
        finally:
            decoding.exception()
            reads.close()

    def _decode(self, i: int, chunks: Sequence[Chunk], start: int, reads: _ReadAhead) -> Segment:
        """Segment ``i`` from the records that hold ``chunks``."""
        buffer = self._staging.buffer(i)
        blob = buffer[: _blob_bytes(self._geometry, chunks)]
        n_cells = sum(chunk.n_tokens for chunk in chunks)
        first, n_seen = 0, 0
        while n_seen < len(chunks):
            record, addresses = reads.next()
            n_good = self._decode_into(blob, n_cells, first, record[: len(addresses)], addresses)
            if n_good < len(record):
                return self._load(chunks[: n_seen + n_good], start, buffer, is_whole=False)
            n_seen += n_good
            first += sum(chunk.n_tokens for chunk in record)
        _native.blob_init(self._geometry, blob, range(start, start + n_cells))
        return Segment(blob, n_cells, is_whole=True)

    def _load(
        self,
        chunks: Sequence[Chunk],
        start: int,
        buffer: NDArray[np.uint8],
        *,
        is_whole: bool = True,
    ) -> Segment:
        """A segment of all that can be had of ``chunks``, read and decoded in this thread."""
        addresses = self._store.fetch(chunks)
        ready = chunks[: len(addresses)]
        is_whole = is_whole and len(ready) == len(chunks)
        if not ready:
            return Segment(buffer[:0], 0, is_whole=False)
        blob = buffer[: _blob_bytes(self._geometry, ready)]
        n_cells = sum(chunk.n_tokens for chunk in ready)
        n_good = self._decode_into(blob, n_cells, 0, ready, addresses)
        if n_good < len(ready):  # the rows of fewer cells lie elsewhere: once more, without it
            return self._load(ready[:n_good], start, buffer, is_whole=False)
        _native.blob_init(self._geometry, blob, range(start, start + n_cells))
        return Segment(blob, n_cells, is_whole)

    def _decode_into(
        self,
        blob: NDArray[np.uint8],
        n_cells: int,
        first: int,
        chunks: Sequence[Chunk],
        addresses: Sequence[int],
    ) -> int:
        """Decode fetched chunks, release them, and count the leading ones that were sound."""
        firsts = list(itertools.accumulate((c.n_tokens for c in chunks[:-1]), initial=first))
        sizes = [chunk.size for chunk in chunks]
        try:
            if chunks:
                _native.chunks_decode_at(self._geometry, addresses, sizes, firsts, blob, n_cells)
        except NativeError as error:
            self._store.fault(chunks[error.n_done])
            return error.n_done
        finally:
            self._store.release(chunks)
        return len(chunks)


class _ReadAhead:
    """Records of at most 1 MiB, in order, the next few on their way from the disk."""

    def __init__(
        self, store: ChunkStore, pool: ThreadPoolExecutor, parts: Sequence[Sequence[Chunk]]
    ) -> None:
        most = min(_native.RECORD_MAX, store.ram_capacity // (2 * _RECORDS_AHEAD))
        self._store = store
        self._pool = pool
        self._records = itertools.chain.from_iterable(_records(part, most) for part in parts)
        self._coming: deque[tuple[Sequence[Chunk], Future[list[int]]]] = deque()
        for _ in range(_RECORDS_AHEAD):
            self._submit()

    def next(self) -> tuple[Sequence[Chunk], list[int]]:
        """The next record's chunks, and the addresses of the leading ones that could be read."""
        chunks, fetched = self._coming.popleft()
        addresses = fetched.result()
        self._submit()
        return chunks, addresses

    def close(self) -> None:
        """Let go of what nobody took."""
        while self._coming:
            chunks, fetched = self._coming.popleft()
            self._store.release(chunks[: len(fetched.result())])

    def _submit(self) -> None:
        record = next(self._records, None)
        if record is not None:
            self._coming.append((record, self._pool.submit(self._store.fetch, record)))


def _records(chunks: Sequence[Chunk], most_bytes: int) -> Iterator[Sequence[Chunk]]:
    """Runs of chunks of at most ``most_bytes`` together, or of one."""
    start, n_bytes = 0, 0
    for i, chunk in enumerate(chunks):
        if i > start and n_bytes + chunk.size > most_bytes:
            yield chunks[start:i]
            start, n_bytes = i, 0
        n_bytes += chunk.size
    yield chunks[start:]


def _blob_bytes(geometry: KVGeometry, chunks: Sequence[Chunk]) -> int:
    return _native.blob_size(geometry, sum(chunk.n_tokens for chunk in chunks))
