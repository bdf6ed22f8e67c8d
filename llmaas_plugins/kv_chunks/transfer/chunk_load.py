"""Decode stored chunks to blobs for the engine."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry, NativeError
from llmaas_plugins.kv_chunks.store.chunk_reader import ChunkReader
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, count_tokens
from llmaas_plugins.signals import signals_wait

__all__ = ["CellSegment", "ChunkLoad", "Decode", "Gap", "ReadTimer", "split_jobs"]

_RAM_JOB_BYTES = 4 << 20
"""Bytes of RAM chunks in one job: few jobs are best, because each handover waits for the GIL."""

Decode = Callable[[Sequence[int], Sequence[int], Sequence[int]], int]
"""Function that decodes payloads, given their addresses, sizes and first cells."""


class CellSegment(NamedTuple):
    """Cells ready for the engine.

    Attributes:
        blob: Input of ``llama_state_seq_set_data``; valid until the next step is asked for.
        n_tokens: Number of tokens in the blob.
    """

    blob: NDArray[np.uint8]
    n_tokens: int


class Gap(NamedTuple):
    """Cells that are not loaded. The engine must compute them before it takes later cells.

    Attributes:
        n_tokens: Number of tokens in the gap.
    """

    n_tokens: int


class ReadTimer:
    """Bytes and time that one load spent on disk reads. Thread-safe."""

    def __init__(self) -> None:
        """Start at zero."""
        self.n_bytes = 0
        self._first = self._last = 0.0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first read to the end of the last one."""
        return self._last - self._first

    def add(self, n_bytes: int, started: float) -> None:
        """Record a read of ``n_bytes`` that began at ``started`` and ended now."""
        with self._lock:
            self._first = min(self._first, started) if self.n_bytes else started
            self._last = time.perf_counter()
            self.n_bytes += n_bytes


class ChunkLoad(NamedTuple):
    """Steps that turn the chunks of one load into blobs."""

    reader: ChunkReader
    geometry: KVGeometry
    reads: ReadTimer

    def load_available(
        self, chunks: Sequence[Chunk], start: int, buffer: NDArray[np.uint8]
    ) -> Generator[CellSegment | Gap, None, int]:
        """Load all available chunks in this thread; yield segments and the gaps between them.

        Returns:
            Tokens of a gap at the end.
        """
        gap = 0
        while chunks:
            with signals_wait():  # what is fetched is pinned until it is decoded
                n_chunks, segment = self._leading(chunks, start, buffer)
            if segment is None:
                n_chunks = _n_absent(chunks)
                gap += count_tokens(chunks[:n_chunks])
            else:
                if gap:
                    yield Gap(gap)
                yield segment
                gap = 0
            start += count_tokens(chunks[:n_chunks])
            chunks = chunks[n_chunks:]
        return gap

    def load_record(
        self, record: Sequence[Chunk], first: int, decode: Decode, read: Future[None] | None = None
    ) -> int:
        """Fetch and decode a record; return how many leading chunks are in place.

        Args:
            record: Chunks of the record.
            first: Index of the record's first cell.
            decode: Decoder that writes to the destination.
            read: Pending read of these chunks into RAM, to wait for; None if there is none.
        """
        if read is not None:
            wait([read])
            if read.cancelled():
                return 0
        addresses = self._fetch(record, was_read=read is not None)
        return self._decode(record[: len(addresses)], addresses, first, decode)

    def blob_decoder(self, blob: NDArray[np.uint8], n_cells: int) -> Decode:
        """Return a decoder that writes to a blob."""

        def decode(
            addresses: Sequence[int], sizes: Sequence[int], first_cells: Sequence[int]
        ) -> int:
            return _native.chunks_decode_at(
                self.geometry, addresses, sizes, first_cells, blob, n_cells
            )

        return decode

    def cell_decoder(self, row_addresses: NDArray[np.uint64], n_cells: int) -> Decode:
        """Return a decoder that writes to the engine's cells."""

        def decode(
            addresses: Sequence[int], sizes: Sequence[int], first_cells: Sequence[int]
        ) -> int:
            return _native.chunks_land_at(
                self.geometry, addresses, sizes, first_cells, row_addresses, n_cells
            )

        return decode

    def prefetch(self, record: Sequence[Chunk], *, is_ahead: bool) -> None:
        """Read a record into RAM; ``is_ahead`` if the engine computes other cells first."""
        self.reader.unpin(record[: len(self._fetch(record, is_ahead=is_ahead))])

    def segment(
        self, buffer: NDArray[np.uint8], chunks: Sequence[Chunk], start: int
    ) -> CellSegment:
        """Write the headers of a blob whose rows are in place, and return it as a segment."""
        n_cells = count_tokens(chunks)
        blob = buffer[: self.blob_bytes(chunks)]
        _native.blob_init(self.geometry, blob, range(start, start + n_cells))
        return CellSegment(blob, n_cells)

    def blob_bytes(self, chunks: Sequence[Chunk]) -> int:
        """Return the size of a blob of these chunks, in bytes."""
        return _native.blob_size(self.geometry, count_tokens(chunks))

    def _leading(
        self, chunks: Sequence[Chunk], start: int, buffer: NDArray[np.uint8]
    ) -> tuple[int, CellSegment | None]:
        """Decode the leading available chunks; return their number and their segment."""
        addresses = self._fetch(chunks)
        ready = chunks[: len(addresses)]
        if not ready:
            return 0, None
        blob = buffer[: self.blob_bytes(ready)]
        decode = self.blob_decoder(blob, count_tokens(ready))
        n_sound = self._decode(ready, addresses, 0, decode)
        if n_sound < len(ready):  # a smaller blob has another row layout: decode again
            return self._leading(ready[:n_sound], start, buffer)
        return n_sound, self.segment(buffer, ready, start)

    def _fetch(
        self, chunks: Sequence[Chunk], *, is_ahead: bool = False, was_read: bool = False
    ) -> list[int]:
        started = time.perf_counter()
        n_bytes = sum(chunk.size for chunk in chunks if chunk.ram == ABSENT)
        addresses = self.reader.fetch(chunks, is_ahead=is_ahead, was_read=was_read)
        if n_bytes and len(addresses) == len(chunks):
            self.reads.add(n_bytes, started)
        return addresses

    def _decode(
        self, chunks: Sequence[Chunk], addresses: Sequence[int], first: int, decode: Decode
    ) -> int:
        """Decode fetched chunks, release them, and return how many leading ones were valid."""
        first_cells = list(itertools.accumulate((c.n_tokens for c in chunks[:-1]), initial=first))
        sizes = [chunk.size for chunk in chunks]
        try:
            if chunks:
                decode(addresses, sizes, first_cells)
        except NativeError as error:
            self.reader.drop_damaged(chunks[error.n_done])
            return error.n_done
        finally:
            self.reader.unpin(chunks)
        return len(chunks)


def split_jobs(chunks: Sequence[Chunk], read_bytes: int) -> Iterator[Sequence[Chunk]]:
    """Group chunks into jobs, apart by whether they are in RAM.

    Args:
        chunks: Chunks in order of position.
        read_bytes: Bytes of one job that reads, about.
    """
    for is_absent, group in itertools.groupby(chunks, key=lambda chunk: chunk.ram == ABSENT):
        yield from _split(list(group), read_bytes if is_absent else _RAM_JOB_BYTES)


def _split(chunks: Sequence[Chunk], job_bytes: int) -> Iterator[Sequence[Chunk]]:
    """Split chunks into runs of about the same size, as many as ``job_bytes`` suggests."""
    ends = list(itertools.accumulate(chunk.size for chunk in chunks))
    total = max(1, ends[-1])
    n_jobs = max(1, round(total / job_bytes))
    start = 0
    for job in range(1, n_jobs + 1):
        end = bisect.bisect_right(ends, total * job // n_jobs)
        if end > start:
            yield chunks[start:end]
            start = end


def _n_absent(chunks: Sequence[Chunk]) -> int:
    """Count the leading chunks to skip: the first one and those after it without bytes."""
    rest = itertools.takewhile(lambda chunk: chunk.is_absent, chunks[1:])
    return 1 + sum(1 for _ in rest)
