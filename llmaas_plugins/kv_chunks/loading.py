"""From stored chunks to blobs that the engine takes."""

from __future__ import annotations

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
from llmaas_plugins.kv_chunks.store import ChunkStore
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, count_tokens

__all__ = ["Gap", "Into", "Load", "Reads", "Segment", "records"]

Into = Callable[[Sequence[int], Sequence[int], Sequence[int]], int]
"""Decodes payloads, given their addresses, sizes and first cells."""


class Segment(NamedTuple):
    """Cells ready for the engine.

    Attributes:
        blob: What ``llama_state_seq_set_data`` takes; valid until the next step is asked for.
        n_tokens: Tokens in it.
    """

    blob: NDArray[np.uint8]
    n_tokens: int


class Gap(NamedTuple):
    """Cells that are not loaded: the engine has to compute them before it takes what follows.

    Attributes:
        n_tokens: Tokens in it.
    """

    n_tokens: int


class Reads:
    """What one load read from disk."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.n_bytes = 0
        self._first = self._last = 0.0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """From the beginning of the first read to the end of the last one."""
        return self._last - self._first

    def add(self, n_bytes: int, started: float) -> None:
        """A read is done that began at ``started``."""
        with self._lock:
            self._first = min(self._first, started) if self.n_bytes else started
            self._last = time.perf_counter()
            self.n_bytes += n_bytes


class Load(NamedTuple):
    """One load's way from chunks to blobs."""

    store: ChunkStore
    geometry: KVGeometry
    reads: Reads

    def whatever(
        self, chunks: Sequence[Chunk], start: int, buffer: NDArray[np.uint8]
    ) -> Generator[Segment | Gap, None, int]:
        """All that can be had of ``chunks``, in this thread; the tokens of a gap at the end."""
        gap = 0
        while chunks:
            n_chunks, segment = self._leading(chunks, start, buffer)
            if segment is None:
                n_chunks = _n_nowhere(chunks)
                gap += count_tokens(chunks[:n_chunks])
            else:
                if gap:
                    yield Gap(gap)
                yield segment
                gap = 0
            start += count_tokens(chunks[:n_chunks])
            chunks = chunks[n_chunks:]
        return gap

    def record(
        self, record: Sequence[Chunk], first: int, into: Into, read: Future[None] | None = None
    ) -> int:
        """Fetch and decode a record, after ``read``; how many leading chunks are in place now.

        Args:
            record: The chunks.
            first: Cell that they begin with.
            into: Where they go.
            read: Brings them into RAM.
        """
        if read is not None:
            wait([read])
            if read.cancelled():
                return 0
        addresses = self._fetch(record)
        return self._decode(record[: len(addresses)], addresses, first, into)

    def into_blob(self, blob: NDArray[np.uint8], n_cells: int) -> Into:
        """Decode into a blob."""

        def into(addresses: Sequence[int], sizes: Sequence[int], firsts: Sequence[int]) -> int:
            return _native.chunks_decode_at(self.geometry, addresses, sizes, firsts, blob, n_cells)

        return into

    def into_cells(self, landings: NDArray[np.uint64], n_cells: int) -> Into:
        """Decode into the engine's cells."""

        def into(addresses: Sequence[int], sizes: Sequence[int], firsts: Sequence[int]) -> int:
            return _native.chunks_land_at(
                self.geometry, addresses, sizes, firsts, landings, n_cells
            )

        return into

    def read(self, record: Sequence[Chunk]) -> None:
        """Bring a record into RAM, ahead of need."""
        self.store.release(record[: len(self._fetch(record, is_ahead=True))])

    def segment(self, buffer: NDArray[np.uint8], chunks: Sequence[Chunk], start: int) -> Segment:
        """Finish a blob whose rows are in place."""
        n_cells = count_tokens(chunks)
        blob = buffer[: self.blob_bytes(chunks)]
        _native.blob_init(self.geometry, blob, range(start, start + n_cells))
        return Segment(blob, n_cells)

    def blob_bytes(self, chunks: Sequence[Chunk]) -> int:
        """Bytes of a blob of these chunks."""
        return _native.blob_size(self.geometry, count_tokens(chunks))

    def _leading(
        self, chunks: Sequence[Chunk], start: int, buffer: NDArray[np.uint8]
    ) -> tuple[int, Segment | None]:
        """The leading ones that can be had, and their number."""
        addresses = self._fetch(chunks)
        ready = chunks[: len(addresses)]
        if not ready:
            return 0, None
        blob = buffer[: self.blob_bytes(ready)]
        into = self.into_blob(blob, count_tokens(ready))
        n_sound = self._decode(ready, addresses, 0, into)
        if n_sound < len(ready):  # the rows of fewer cells lie elsewhere: once more, without it
            return self._leading(ready[:n_sound], start, buffer)
        return n_sound, self.segment(buffer, ready, start)

    def _fetch(self, chunks: Sequence[Chunk], *, is_ahead: bool = False) -> list[int]:
        started = time.perf_counter()
        n_bytes = sum(chunk.size for chunk in chunks if chunk.ram == ABSENT)
        addresses = self.store.fetch(chunks, is_ahead=is_ahead)
        if n_bytes and len(addresses) == len(chunks):
            self.reads.add(n_bytes, started)
        return addresses

    def _decode(
        self, chunks: Sequence[Chunk], addresses: Sequence[int], first: int, into: Into
    ) -> int:
        """Decode fetched chunks, release them, and count the leading ones that were sound."""
        firsts = list(itertools.accumulate((c.n_tokens for c in chunks[:-1]), initial=first))
        sizes = [chunk.size for chunk in chunks]
        try:
            if chunks:
                into(addresses, sizes, firsts)
        except NativeError as error:
            self.store.fault(chunks[error.n_done])
            return error.n_done
        finally:
            self.store.release(chunks)
        return len(chunks)


def records(
    chunks: Sequence[Chunk], most_bytes: int = _native.RECORD_MAX
) -> Iterator[Sequence[Chunk]]:
    """Runs of chunks of at most so many bytes together, 1 MiB by default, or of one."""
    start, n_bytes = 0, 0
    for i, chunk in enumerate(chunks):
        if i > start and n_bytes + chunk.size > most_bytes:
            yield chunks[start:i]
            start, n_bytes = i, 0
        n_bytes += chunk.size
    yield chunks[start:]


def _n_nowhere(chunks: Sequence[Chunk]) -> int:
    """Leading chunks to give up: the first one, and all behind it that have no bytes either."""
    rest = itertools.takewhile(lambda chunk: chunk.is_nowhere, chunks[1:])
    return 1 + sum(1 for _ in rest)
