"""Loading in stages that overlap (LLMS Fig. 8 without recompute).

While the engine takes one segment's blob, a few threads each read a record of the next ones, verify
it and decode it, still in the core's cache, to its place in its segment's blob.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry, NativeError
from llmaas_plugins.kv_chunks.staging import Staging
from llmaas_plugins.kv_chunks.store import ChunkStore
from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["Loader", "Segment", "Workers"]

_LOADERS = 4
_SMALL_BYTES = 16 << 20


class Workers:
    """The plugin's threads: loading and swap-out writes do not wait for each other."""

    def __init__(self) -> None:
        """No thread starts before its first job."""
        self.load = ThreadPoolExecutor(_LOADERS, thread_name_prefix="llmaas-kv-load")
        self.write = ThreadPoolExecutor(1, thread_name_prefix="llmaas-kv-write")

    def close(self) -> None:
        """Finish what is queued."""
        for pool in (self.load, self.write):
            pool.shutdown(wait=True)


class Segment(NamedTuple):
    """Cells ready for the engine.

    Attributes:
        blob: What ``llama_state_seq_set_data`` takes; valid until the next segment is asked for.
        n_tokens: Tokens in it.
        is_whole: False when a chunk was missing or damaged: this is the last segment then.
    """

    blob: NDArray[np.uint8]
    n_tokens: int
    is_whole: bool


class Loader:
    """Turns stored chunks into segments for an engine whose cells have ``geometry``."""

    def __init__(
        self, store: ChunkStore, staging: Staging, pool: ThreadPoolExecutor, geometry: KVGeometry
    ) -> None:
        """Make sure of the transfer buffers.

        Raises:
            BudgetError: They do not fit the RAM budget.
        """
        self._store = store
        self._staging = staging
        self._pool = pool
        self._geometry = geometry
        self._step = staging.segment_chunks(geometry)

    def segments(self, chunks: Sequence[Chunk], start: int) -> Generator[Segment]:
        """Segments of ``chunks``, each ready as it is yielded; the last may not be whole.

        Hold ``staging.lock`` until the generator is exhausted or closed.

        Args:
            chunks: In order of position, without gaps.
            start: Position of the first chunk's first token.
        """
        n_bytes, room = _blob_bytes(self._geometry, chunks), len(self._staging.whole)
        if n_bytes <= room:
            yield from self._in_this_thread([chunks], start)
        elif n_bytes <= _SMALL_BYTES and all(chunk.ram >= 0 for chunk in chunks):
            yield from self._in_this_thread(_parts(chunks, Staging.BUFFERS * self._step), start)
        else:
            yield from self._overlapped(_parts(chunks, self._step), start)

    def _in_this_thread(self, parts: Sequence[Sequence[Chunk]], start: int) -> Generator[Segment]:
        """Where handing over would cost more than it hides."""
        for part in parts:
            segment = self._load(part, start, self._staging.whole)
            start += segment.n_tokens
            yield segment
            if not segment.is_whole:
                return

    def _overlapped(self, parts: Sequence[Sequence[Chunk]], start: int) -> Generator[Segment]:
        jobs = deque(self._submit(i, part) for i, part in enumerate(parts[: Staging.BUFFERS]))
        try:
            for i, part in enumerate(parts):
                n_sound = _leading(jobs[0])
                if n_sound < len(part):
                    buffer = self._staging.buffer(i)
                    yield self._load(part[:n_sound], start, buffer, is_whole=False)
                    return
                segment = self._segment(self._staging.buffer(i), part, start)
                start += segment.n_tokens
                yield segment
                jobs.popleft()
                later = i + Staging.BUFFERS
                if later < len(parts):
                    jobs.append(self._submit(later, parts[later]))
        finally:
            wait(future for job in jobs for _, future in job)

    def _submit(self, i: int, part: Sequence[Chunk]) -> _Job:
        blob = self._staging.buffer(i)[: _blob_bytes(self._geometry, part)]
        n_cells, first = sum(chunk.n_tokens for chunk in part), 0
        job: _Job = []
        for record in _records(part):
            future = self._pool.submit(self._load_record, record, blob, n_cells, first)
            job.append((len(record), future))
            first += sum(chunk.n_tokens for chunk in record)
        return job

    def _load_record(
        self, record: Sequence[Chunk], blob: NDArray[np.uint8], n_cells: int, first: int
    ) -> int:
        """Fetch and decode a record; how many of its leading chunks are in the blob now."""
        addresses = self._store.fetch(record)
        return self._decode(blob, n_cells, first, record[: len(addresses)], addresses)

    def _load(
        self,
        chunks: Sequence[Chunk],
        start: int,
        buffer: NDArray[np.uint8],
        *,
        is_whole: bool = True,
    ) -> Segment:
        """A segment of all that can be had of ``chunks``, in this thread."""
        addresses = self._store.fetch(chunks)
        ready = chunks[: len(addresses)]
        if not ready:
            return Segment(buffer[:0], 0, is_whole=False)
        blob = buffer[: _blob_bytes(self._geometry, ready)]
        n_cells = sum(chunk.n_tokens for chunk in ready)
        n_sound = self._decode(blob, n_cells, 0, ready, addresses)
        if n_sound < len(ready):  # the rows of fewer cells lie elsewhere: once more, without it
            return self._load(ready[:n_sound], start, buffer, is_whole=False)
        segment = self._segment(buffer, ready, start)
        return segment._replace(is_whole=is_whole and len(ready) == len(chunks))

    def _decode(
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

    def _segment(self, buffer: NDArray[np.uint8], chunks: Sequence[Chunk], start: int) -> Segment:
        """Finish a blob whose rows are in place."""
        n_cells = sum(chunk.n_tokens for chunk in chunks)
        blob = buffer[: _blob_bytes(self._geometry, chunks)]
        _native.blob_init(self._geometry, blob, range(start, start + n_cells))
        return Segment(blob, n_cells, is_whole=True)


_Job = list[tuple[int, Future[int]]]
"""The records of a segment: their number of chunks, and how many leading ones were sound."""


def _leading(job: _Job) -> int:
    """Leading sound chunks of a segment; waits for all of its records."""
    sound = [(n_chunks, future.result()) for n_chunks, future in job]
    whole = list(itertools.takewhile(lambda pair: pair[0] == pair[1], sound))
    broken = sound[len(whole)][1] if len(whole) < len(sound) else 0
    return sum(n_chunks for n_chunks, _ in whole) + broken


def _parts(chunks: Sequence[Chunk], step: int) -> list[Sequence[Chunk]]:
    return [chunks[i : i + step] for i in range(0, len(chunks), step)]


def _records(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """Runs of chunks of at most 1 MiB together, or of one."""
    start, n_bytes = 0, 0
    for i, chunk in enumerate(chunks):
        if i > start and n_bytes + chunk.size > _native.RECORD_MAX:
            yield chunks[start:i]
            start, n_bytes = i, 0
        n_bytes += chunk.size
    yield chunks[start:]


def _blob_bytes(geometry: KVGeometry, chunks: Sequence[Chunk]) -> int:
    return _native.blob_size(geometry, sum(chunk.n_tokens for chunk in chunks))
