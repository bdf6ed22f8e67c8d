"""Load chunks in overlapping stages (LLMS Fig. 8).

While the engine takes one segment's blob, two threads read and verify chunks of later segments into
the RAM tier, and others decode what was read into its segment's blob. While the engine recomputes
cells, only one thread reads the chunks after them, one system call at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from llmaas_hooks import forks
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, count_tokens
from llmaas_plugins.kv_chunks.transfer.chunk_load import (
    CellSegment,
    ChunkLoad,
    Gap,
    ReadTimer,
    split_jobs,
)
from llmaas_plugins.kv_chunks.transfer.planning import ChunkRun
from llmaas_plugins.kv_chunks.transfer.staging import Staging
from llmaas_plugins.signals import signals_wait

__all__ = ["N_LOAD_THREADS", "SegmentLoader", "Workers"]

N_LOAD_THREADS, _N_READ_THREADS = 4, 2
_READ_BYTES = 2 << 20
"""Bytes of one read, about. Its system calls are in flight together."""
_SMALL_BYTES = 16 << 20
_READ_AHEAD_DIVISOR = 2

_T = TypeVar("_T")


class _ThreadPool(ThreadPoolExecutor):
    """Thread pool that runs a job in the caller's thread if it cannot start one."""

    def submit(self, job: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run ``job`` in a thread of the pool, or here, but only once.

        A pool that cannot start a thread has queued the job before it raises.
        """
        made: Future[_T] = Future()
        unclaimed = [made]

        def run() -> None:
            try:
                future = unclaimed.pop()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        with signals_wait():
            try:
                super().submit(run)
            except RuntimeError:
                run()
        return made


class Workers(forks.Forked):
    """The plugin's threads. Loads and swap-out writes have their own, so that neither waits."""

    def __init__(self) -> None:
        """Create the pools; no thread starts before its first job."""
        self._make()
        forks.watch(self)

    def _make(self) -> None:
        self.load = _ThreadPool(N_LOAD_THREADS, thread_name_prefix="llmaas-kv-load")
        self.read = _ThreadPool(_N_READ_THREADS, thread_name_prefix="llmaas-kv-read")
        self.ahead = _ThreadPool(1, thread_name_prefix="llmaas-kv-ahead")
        self.write = _ThreadPool(1, thread_name_prefix="llmaas-kv-write")

    def after_fork(self, *, in_child: bool) -> None:
        """Create new pools in a forked child, which has none of its parent's threads."""
        if in_child:
            self._make()

    def close(self) -> None:
        """Finish all queued jobs and stop the threads."""
        pools = self.ahead, self.read, self.load, self.write
        with signals_wait():  # Ctrl-C ends the wait below, but not before every pool is to end
            for pool in pools:
                pool.shutdown(wait=False)
        for pool in pools:
            pool.shutdown(wait=True)


class SegmentLoader:
    """Converter of stored chunks to segments for an engine whose cells have ``geometry``."""

    def __init__(
        self, store: ChunkStore, staging: Staging, workers: Workers, geometry: KVGeometry
    ) -> None:
        """Reserve the transfer buffers.

        Raises:
            BudgetError: The buffers do not fit the RAM budget.
        """
        self._store = store
        self._staging = staging
        self._workers = workers
        self._geometry = geometry
        self._step = staging.segment_chunks(geometry)

    def steps(
        self, runs: Sequence[ChunkRun], start: int, reads: ReadTimer
    ) -> Generator[CellSegment | Gap]:
        """Yield the segments to load and the gaps to compute, in order of position.

        Missing or damaged chunks become gaps, except at the end, where they are left out. Hold
        the buffers (``Staging.used``) until the generator is exhausted or closed.

        Args:
            runs: Contiguous runs in order of position; the last one is loaded.
            start: Position of the first run's first token.
            reads: Record of the disk reads, which this load updates.
        """
        load = ChunkLoad(self._store.reader, self._geometry, reads)
        chunks = [chunk for run in runs if run.is_loaded for chunk in run.chunks]
        is_in_ram = all(chunk.ram != ABSENT for chunk in chunks)
        n_bytes, room = load.blob_bytes(chunks), len(self._staging.all_buffers)
        waits = len(chunks) < sum(len(run.chunks) for run in runs) and not is_in_ram
        if not waits and (n_bytes <= room or (is_in_ram and n_bytes <= _SMALL_BYTES)):
            yield from self._in_this_thread(load, _parts(runs, Staging.BUFFERS * self._step), start)
        else:
            reader = None
            if not is_in_ram:
                reader = self._workers.ahead if waits else self._workers.read
            yield from self._overlapped(load, _parts(runs, self._step), start, reader)

    def _in_this_thread(
        self, load: ChunkLoad, parts: Sequence[ChunkRun], start: int
    ) -> Generator[CellSegment | Gap]:
        """Load without threads, where handing jobs over would cost more time than it saves."""
        whole = self._staging.all_buffers
        return _in_order(parts, start, lambda part, at: load.load_available(part.chunks, at, whole))

    def _overlapped(
        self, load: ChunkLoad, parts: Sequence[ChunkRun], start: int, reader: Executor | None
    ) -> Generator[CellSegment | Gap]:
        feed = _BufferRing(
            load,
            [part.chunks for part in parts if part.is_loaded],
            self._staging,
            self._workers,
            reader=reader,
            ahead_bytes=self._store.space.capacity // _READ_AHEAD_DIVISOR,
        )
        try:
            feed.start()
            yield from _in_order(parts, start, lambda _, at: feed.next_part(at))
        finally:
            feed.close()


class _BufferRing:
    """Ring of buffers that jobs fill part by part, with disk reads ahead of it."""

    def __init__(  # noqa: PLR0913 -- what to load, by whom, within which bounds
        self,
        load: ChunkLoad,
        parts: Sequence[Sequence[Chunk]],
        staging: Staging,
        workers: Workers,
        *,
        reader: Executor | None,
        ahead_bytes: int,
    ) -> None:
        """Prepare; ``start`` begins the work.

        Args:
            load: Steps of this load.
            parts: Chunks of each buffer.
            staging: Ring of buffers.
            workers: Threads for the jobs.
            reader: Threads that read; None if all chunks are in RAM.
            ahead_bytes: Most bytes to read ahead of the engine.
        """
        self._load = load
        self._parts = parts
        self._records = [list(split_jobs(part, _READ_BYTES)) for part in parts]
        self._staging = staging
        self._workers = workers
        self._reader, self._ahead_bytes = reader, ahead_bytes
        self._n_done = 0
        self._reads: list[list[Future[None] | None]] = []
        self._jobs: deque[_PartJobs] = deque()

    @signals_wait()
    def start(self) -> None:
        """Start to read and to fill the buffers."""
        self._read_ahead()
        for i in range(min(Staging.BUFFERS, len(self._parts))):
            self._decode(i)

    def next_part(self, start: int) -> Generator[CellSegment | Gap, None, int]:
        """Yield the next part's segments and gaps; return the tokens of a gap at its end."""
        i, part = self._n_done, self._parts[self._n_done]
        buffer, gap = self._staging.buffer(i), 0
        if _n_sound(self._jobs[0]) == len(part):
            yield self._load.segment(buffer, part, start)
        else:  # a smaller blob has another row layout
            gap = yield from self._load.load_available(part, start, buffer)
        self._advance()
        return gap

    def close(self) -> None:
        """Cancel pending jobs and wait for running ones."""
        with signals_wait():
            reads = filter(None, itertools.chain(*self._reads))
            wait([read for read in reads if not read.cancel()])
            self._staging.settle()

    @signals_wait()
    def _advance(self) -> None:
        """Fill the buffer of the part that the engine took."""
        self._jobs.popleft()
        self._n_done += 1
        self._read_ahead()
        i = self._n_done - 1 + Staging.BUFFERS
        if i < len(self._parts):
            self._decode(i)

    def _read_ahead(self) -> None:
        """Submit reads of parts that the engine has not taken yet, up to ``_ahead_bytes``."""
        if self._reader is None:
            return
        is_ahead = self._reader is self._workers.ahead
        prefetch = functools.partial(self._load.prefetch, is_ahead=is_ahead)
        while len(self._reads) < len(self._parts):
            i = len(self._reads)
            waiting = itertools.chain(*self._parts[self._n_done : i + 1])
            if i >= self._n_done + Staging.BUFFERS and _bytes(waiting) > self._ahead_bytes:
                return
            submit, reads = self._reader.submit, self._reads
            reads.append([])
            reads[i].extend(
                submit(prefetch, record) if record[0].ram == ABSENT else None
                for record in self._records[i]
            )

    def _decode(self, i: int) -> None:
        """Submit the jobs that fill part ``i``'s buffer."""
        part, records = self._parts[i], self._records[i]
        reads = [None] * len(records) if self._reader is None else self._reads[i]
        blob, first = self._staging.buffer(i)[: self._load.blob_bytes(part)], 0
        decode = self._load.blob_decoder(blob, count_tokens(part))
        job: _PartJobs = []
        self._jobs.append(job)
        for record, read in zip(records, reads, strict=True):
            job.append(
                self._workers.load.submit(self._load.load_record, record, first, decode, read)
            )
            self._staging.is_written_by(job[-1])
            first += count_tokens(record)


_PartJobs = list[Future[int]]
"""Futures of a part's records; each gives how many of its record's chunks are in the blob."""


def _n_sound(job: _PartJobs) -> int:
    """Wait for all jobs of a part; return how many of its chunks are in the blob."""
    with signals_wait():
        wait(job)
        return sum(future.result() for future in job)


def _bytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)


def _in_order(
    parts: Sequence[ChunkRun],
    start: int,
    take: Callable[[ChunkRun, int], Generator[CellSegment | Gap, None, int]],
) -> Generator[CellSegment | Gap]:
    """Yield what ``take`` yields for each loaded part, given its position, and the gaps between."""
    for part in parts:
        gap = part.n_tokens
        if part.is_loaded:
            gap = yield from take(part, start)
        if gap and part is not parts[-1]:
            yield Gap(gap)
        start += part.n_tokens


def _parts(runs: Sequence[ChunkRun], step: int) -> list[ChunkRun]:
    """Split loaded runs into parts of at most ``step`` chunks; keep recomputed runs whole."""
    parts: list[ChunkRun] = []
    for run in runs:
        n = step if run.is_loaded else len(run.chunks)
        parts += [
            ChunkRun(run.chunks[i : i + n], run.is_loaded) for i in range(0, len(run.chunks), n)
        ]
    return parts
