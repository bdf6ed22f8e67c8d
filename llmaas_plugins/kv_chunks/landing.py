"""Loading straight into the engine's cells.

The engine labels cells for all that is loaded, and says where their rows belong. Threads read and
verify what is on disk, and decode every chunk to its place; nothing is copied. That is for loads
without gaps: where something has to be recomputed, ``pipeline`` brings segment after segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.loading import Load, records
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, count_tokens

__all__ = ["land"]

_PIECE_BYTES = 4 << 20
"""Of chunks in RAM: few handovers, as each waits for Python's lock."""


def land(
    load: Load, chunks: Sequence[Chunk], landings: NDArray[np.uint64], threads: Executor
) -> int:
    """Decode stored chunks to their cells; how many leading ones were sound.

    Args:
        load: Where from.
        chunks: In order of position.
        landings: Where their rows belong (``Cells.land``).
        threads: Who helps.
    """
    pieces = list(_pieces(chunks))
    counts = map(count_tokens, pieces)
    firsts = list(itertools.accumulate(counts, initial=0))
    into = load.into_cells(landings, firsts[-1])

    def work(i: int) -> int:
        return load.record(pieces[i], firsts[i], into)

    order = sorted(range(len(pieces)), key=lambda i: pieces[i][0].ram != ABSENT)  # reads first
    n_sound = _together(threads, work, order)
    leading = itertools.takewhile(lambda i: n_sound[i] == len(pieces[i]), range(len(pieces)))
    n_whole = sum(1 for _ in leading)
    return sum(n_sound[i] for i in range(min(n_whole + 1, len(pieces))))


def _pieces(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """Chunks that are treated together: records of what is read, more of what is in RAM."""
    for is_absent, group in itertools.groupby(chunks, key=lambda chunk: chunk.ram == ABSENT):
        if is_absent:
            yield from records(list(group))
        else:
            yield from records(list(group), _PIECE_BYTES)


def _together(threads: Executor, work: Callable[[int], int], order: Sequence[int]) -> list[int]:
    """What ``work`` returns for each index; this thread helps, from the end of ``order``.

    Nothing is under way any more when it returns or raises, nor begins later: the cells are the
    engine's again. Hence jobs of its own, which it can call off whatever the threads are doing.
    """
    if len(order) == 1:
        return [work(order[0])]
    jobs: dict[int, Future[int]] = {i: Future() for i in order}

    def run(i: int) -> None:
        job = jobs[i]
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work(i))
            except BaseException as error:  # Ctrl-C, too, is for who waits
                job.set_exception(error)

    try:
        for i in order:
            threads.submit(run, i)
        done = {i: work(i) for i in reversed(order) if jobs[i].cancel()}
        return [done[i] if i in done else jobs[i].result() for i in range(len(order))]
    finally:
        wait([job for job in jobs.values() if not job.cancel()])
