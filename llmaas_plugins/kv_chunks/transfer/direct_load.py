"""Decode stored chunks directly into the engine's cells.

The engine labels cells for all loaded tokens and returns the addresses of their rows. Threads read
and verify chunks on disk, and decode every chunk to its address without a copy. This only works
for loads without gaps. If some tokens must be recomputed, ``pipeline`` loads segment by segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, count_tokens
from llmaas_plugins.kv_chunks.transfer.chunk_load import ChunkLoad, split_jobs
from llmaas_plugins.signals import signals_wait

__all__ = ["load_into_cells"]


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
    jobs = list(split_jobs(chunks))
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

    This thread takes jobs from the end of ``order`` while the others begin at the start. When this
    function returns or raises, no job runs and none starts later, because the engine then uses the
    cells again. It therefore makes its own futures, which it can cancel at any time.
    """
    if len(order) == 1:
        return [work(order[0])]
    futures: dict[int, Future[int]] = {i: Future() for i in order}

    def run(i: int) -> None:
        future = futures[i]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(i))
            except BaseException as error:  # pass everything, even Ctrl-C, to the waiting thread
                future.set_exception(error)

    try:
        for i in order:
            threads.submit(run, i)
        done = {i: work(i) for i in reversed(order) if futures[i].cancel()}
        return [done[i] if i in done else futures[i].result() for i in range(len(order))]
    finally:
        wait([future for future in futures.values() if not future.cancel()])
