"""Choose the chunks to recompute while the rest is read: an exact solution of LLMS Eq 4.

The paper minimizes ``max(T_re(x), T_IO(m - x))``: x chunks are recomputed while the others are read
from disk. Here the engine works in order of position, because computing a chunk needs all chunks
before it. The earliest chunks are therefore the ones to recompute, and a plan is one number, the
*cut*. Disk-only chunks before the cut are recomputed, and those after it are read. Unlike in the
paper, there is no choice between chunks of different levels. Chunks in RAM are always loaded, and
ghosts are always recomputed.

``T_re`` becomes all of the engine's time, including the transfer of loaded cells. ``T_IO`` becomes
the longest path from the first byte read to the end: the time until some chunk is read, plus the
engine's time from that chunk on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, count_tokens

__all__ = [
    "ChunkRun",
    "LoadCosts",
    "LoadPlan",
    "LoadWork",
    "as_runs",
    "best_cut",
    "cut_delays",
    "plan_load",
]

_MAX_TIME_SHARE = 0.95
"""Recomputing must cut the predicted time below this share; a smaller gain is within noise."""


class LoadCosts(NamedTuple):
    """Measured costs, in seconds (LLMS §3.3, *profiling*).

    Attributes:
        call: Fixed cost of a ``llama_decode`` call.
        token: Cost per token of the call.
        pair: Cost per pair of a token and a token that it attends to.
        read: Latency of the first byte from disk.
        byte: Cost per byte read.
        load: Fixed cost of a load.
        put: Cost per token to decode its cells and hand them to the engine.
    """

    call: float
    token: float
    pair: float
    read: float
    byte: float
    load: float
    put: float


class LoadWork(NamedTuple):
    """Contiguous chunks to load; the arrays have shape ``(n_chunks,)``.

    Attributes:
        start: Position of the first token.
        n_tokens: Tokens of each chunk.
        n_bytes: Bytes to read for each chunk; 0 if it is in RAM or a ghost.
        is_ghost: Whether each chunk can only be recomputed.
        n_batch: Most tokens of a ``llama_decode`` call.
    """

    start: int
    n_tokens: NDArray[np.int64]
    n_bytes: NDArray[np.int64]
    is_ghost: NDArray[np.bool_]
    n_batch: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], start: int, n_batch: int) -> LoadWork:
        """Return the work for stored chunks from position ``start`` on."""
        return cls(
            start,
            np.array([chunk.n_tokens for chunk in chunks], dtype=np.int64),
            np.array([_bytes_to_read(chunk) for chunk in chunks], dtype=np.int64),
            np.array([chunk.is_absent for chunk in chunks], dtype=np.bool_),
            n_batch,
        )


class ChunkRun(NamedTuple):
    """Consecutive chunks that are all loaded or all recomputed.

    Attributes:
        chunks: Chunks in order of position.
        is_loaded: True if the chunks are loaded, False if their tokens are recomputed.
    """

    chunks: Sequence[Chunk]
    is_loaded: bool

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the chunks cover."""
        return count_tokens(self.chunks)


class LoadPlan(NamedTuple):
    """Result of planning a load.

    Attributes:
        runs: Runs in order of position, possibly none; the last one is loaded.
        seconds: Predicted time; None if too little is known.
    """

    runs: list[ChunkRun]
    seconds: float | None


def plan_load(
    chunks: Sequence[Chunk], start: int, n_batch: int, costs: LoadCosts | None
) -> LoadPlan:
    """Plan how to load stored chunks from position ``start`` on.

    Chunks to recompute at the end are left out, because they are evaluated with the rest of the
    prompt. While the costs are unknown, all stored chunks are loaded.
    """
    if costs is None:
        return LoadPlan(as_runs(chunks, 0), None)
    cut = best_cut(LoadWork.of(chunks, start, n_batch), costs)
    runs = as_runs(chunks, cut)
    rest = chunks[: sum(len(run.chunks) for run in runs)]
    seconds = cut_delays(LoadWork.of(rest, start, n_batch), costs)[min(cut, len(rest))]
    return LoadPlan(runs, float(seconds))


def best_cut(work: LoadWork, costs: LoadCosts) -> int:
    """Return the cut with the least delay, or 0 if the gain is too small to be worthwhile."""
    seconds = cut_delays(work, costs)
    cut = int(np.argmin(seconds))
    return cut if seconds[cut] < _MAX_TIME_SHARE * seconds[0] else 0


def cut_delays(work: LoadWork, costs: LoadCosts) -> NDArray[np.float64]:
    """Return the predicted delay of each cut from 0 to the number of chunks, inclusive (Eq 4).

    A cut right before a ghost equals the cut after it; its delay is set to infinity.
    """
    is_read = work.n_bytes > 0
    done_before = _summed(_engine_seconds(work, costs, is_read | work.is_ghost))
    still_to_do = _summed(_engine_seconds(work, costs, work.is_ghost)[::-1])[::-1]
    read_before = costs.byte * _summed(work.n_bytes)
    way = np.where(is_read, read_before[1:] + still_to_do[:-1], -np.inf)
    longest = np.append(np.maximum.accumulate(way[::-1])[::-1], -np.inf)
    t_re = done_before + still_to_do
    t_io = costs.read + longest - read_before
    seconds = costs.load + np.maximum(t_re, t_io)
    seconds[1:-1][work.is_ghost[1:]] = np.inf
    return seconds


def as_runs(chunks: Sequence[Chunk], cut: int) -> list[ChunkRun]:
    """Convert a cut to runs; leave out a last run that is recomputed."""
    is_loaded = [
        not chunk.is_absent and (i >= cut or chunk.ram != ABSENT) for i, chunk in enumerate(chunks)
    ]
    groups = itertools.groupby(zip(is_loaded, chunks, strict=True), key=lambda pair: pair[0])
    found = [ChunkRun([chunk for _, chunk in group], loaded) for loaded, group in groups]
    return found if found and found[-1].is_loaded else found[:-1]


def _engine_seconds(
    work: LoadWork, costs: LoadCosts, is_recomputed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the engine's time for each chunk, to evaluate it or to take its loaded cells.

    Chunks are evaluated in as few calls as possible. The fixed cost of a call counts for the chunk
    in which the call begins.
    """
    end = work.start + np.cumsum(work.n_tokens)
    begin = end - work.n_tokens
    is_first = is_recomputed & ~np.append(False, is_recomputed[:-1])
    run_begin = np.maximum.accumulate(np.where(is_first, begin, 0))
    n_calls = -(-(end - run_begin) // work.n_batch) + (run_begin - begin) // work.n_batch
    n_pairs = work.n_tokens * (begin + work.n_tokens / 2)
    recomputed = costs.call * n_calls + costs.token * work.n_tokens + costs.pair * n_pairs
    return np.where(is_recomputed, recomputed, costs.put * work.n_tokens)


def _summed(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of the first 0, 1, … n values."""
    return np.append(0.0, np.cumsum(values))


def _bytes_to_read(chunk: Chunk) -> int:
    return chunk.size if chunk.ram == ABSENT and chunk.disk != ABSENT else 0
