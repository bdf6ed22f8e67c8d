"""Decode stored chunks directly into the engine's cells.

The engine labels cells for all loaded tokens and returns the addresses of their rows. Threads read
and verify chunks on disk, and decode every chunk to its address without a copy. This only works
for loads without gaps. If some tokens must be recomputed, ``pipeline`` loads segment by segment.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, count_tokens
from llmaas_plugins.kv_chunks.transfer.chunk_load import ChunkLoad, split_jobs
from llmaas_plugins.kv_chunks.transfer.pipeline import N_LOAD_THREADS
from llmaas_plugins.signals import signals_wait

__all__ = ["load_into_cells"]

_READ_BYTES = 1 << 20
"""Bytes of one job that reads, about: all threads read at once."""


def load_into_cells(
    load: ChunkLoad, chunks: Sequence[Chunk], row_addresses: NDArray[np.uint64], threads: Executor
) -> int:
    """Decode stored chunks to their cells; return how many leading chunks were valid.

    Args:
        load: Source of the chunks.
        chunks: Chunks in order of position.
        row_addresses: Addresses of their rows (``KVCells.label_cells``).
        threads: Threads that share the work with this one.
    """
    jobs = list(split_jobs(chunks, _READ_BYTES))
    counts = map(count_tokens, jobs)
    first_cells = list(itertools.accumulate(counts, initial=0))
    decode = load.cell_decoder(row_addresses, first_cells[-1])

    def work(i: int) -> int:
        return load.load_record(jobs[i], first_cells[i], decode)

    order = sorted(range(len(jobs)), key=lambda i: jobs[i][0].ram != ABSENT)  # disk reads first
    with signals_wait():  # threads write into the cells
        n_sound = _run_shared(threads, work, order)
    leading = itertools.takewhile(lambda i: n_sound[i] == len(jobs[i]), range(len(jobs)))
    n_whole = sum(1 for _ in leading)
    return sum(n_sound[i] for i in range(min(n_whole + 1, len(jobs))))


def _run_shared(threads: Executor, work: Callable[[int], int], order: Sequence[int]) -> list[int]:
    """Run ``work`` for each index and return the results by index.

    This thread takes indices from the end of ``order`` while the others begin at the start. When
    this function returns or raises, no work runs and none starts later, because the engine then
    uses the cells again. It therefore makes its own futures: a submission that fails may have
    queued its job.
    """
    left, done = deque(order), dict[int, int]()
    others = [Future[None]() for _ in range(min(N_LOAD_THREADS, len(order) - 1))]

    def run(take: Callable[[], int]) -> None:
        while left:
            try:
                i = take()
            except IndexError:  # another thread was faster
                return
            done[i] = work(i)

    def run_beside(future: Future[None]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                run(left.popleft)
                future.set_result(None)
            except BaseException as error:  # pass everything, even Ctrl-C, to the waiting thread
                future.set_exception(error)

    try:
        for other in others:
            threads.submit(run_beside, other)
        run(left.pop)
        for other in others:
            if not other.cancel():
                other.result()
        return [done[i] for i in range(len(order))]
    finally:
        left.clear()
        wait([other for other in others if not other.cancel()])
