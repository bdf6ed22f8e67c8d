"""What a load recomputes while the rest is read: LLMS Eq 4, solved exactly.

The paper minimises ``max(T_re(x), T_IO(m - x))``: x chunks are recomputed while the others are read
from disk. Here everything happens in order of position, since a chunk is computed from all before
it. So the earliest chunks are the ones to recompute, and a plan is one number, the *cut*: of the
chunks that are only on disk, those before it are recomputed and those behind it read. Which of
several levels to recompute, as in the paper, is no question then. Chunks in RAM are loaded and
ghosts recomputed, wherever they are.

``T_re`` becomes all that the engine does, handing over what was loaded included. ``T_IO`` becomes
the longest way from the first byte read to the end: until some chunk is read, and then what the
engine has to do from that chunk on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, count_tokens

__all__ = ["Costs", "Plan", "Run", "Work", "as_runs", "best_cut", "delays", "plan"]

_WORTH_WHILE = 0.95
"""A split must promise to take this share of the time without; less is within what costs vary."""


class Costs(NamedTuple):
    """Seconds that each of these takes (LLMS §3.3, *profiling*).

    Attributes:
        call: A ``llama_decode``.
        token: A token in it.
        pair: A token and one that it attends to.
        read: The first byte from disk.
        byte: Each byte.
        load: Beginning to load.
        put: Decoding a token's cells and handing them to the engine.
    """

    call: float
    token: float
    pair: float
    read: float
    byte: float
    load: float
    put: float


class Work(NamedTuple):
    """Chunks to load, without gaps between them; arrays of shape ``(n_chunks,)``.

    Attributes:
        start: Position of the first token.
        n_tokens: Tokens of each.
        n_bytes: Bytes to be read of each; 0 if it is in RAM, or a ghost.
        is_ghost: Whether it can only be recomputed.
        n_batch: Most tokens of a ``llama_decode``.
    """

    start: int
    n_tokens: NDArray[np.int64]
    n_bytes: NDArray[np.int64]
    is_ghost: NDArray[np.bool_]
    n_batch: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], start: int, n_batch: int) -> Work:
        """What there is to do for stored chunks from position ``start`` on."""
        return cls(
            start,
            np.array([chunk.n_tokens for chunk in chunks], dtype=np.int64),
            np.array([_bytes_to_read(chunk) for chunk in chunks], dtype=np.int64),
            np.array([chunk.is_nowhere for chunk in chunks], dtype=np.bool_),
            n_batch,
        )


class Run(NamedTuple):
    """Consecutive chunks that are treated alike.

    Attributes:
        chunks: In order of position.
        is_loaded: Otherwise their tokens are evaluated.
    """

    chunks: Sequence[Chunk]
    is_loaded: bool

    @property
    def n_tokens(self) -> int:
        """Tokens they cover."""
        return count_tokens(self.chunks)


class Plan(NamedTuple):
    """The best way to load.

    Attributes:
        runs: In order of position; the last one is loaded, if there is any.
        seconds: What that should take; None if too little is known.
    """

    runs: list[Run]
    seconds: float | None


def plan(chunks: Sequence[Chunk], start: int, n_batch: int, costs: Costs | None) -> Plan:
    """The best way to load stored chunks from position ``start`` on.

    Chunks to be recomputed at the end are not part of it: they are evaluated with the rest of the
    prompt. While the costs are not known, all that is stored is loaded.
    """
    if costs is None:
        return Plan(as_runs(chunks, 0), None)
    cut = best_cut(Work.of(chunks, start, n_batch), costs)
    runs = as_runs(chunks, cut)
    rest = chunks[: sum(len(run.chunks) for run in runs)]
    seconds = delays(Work.of(rest, start, n_batch), costs)[min(cut, len(rest))]
    return Plan(runs, float(seconds))


def best_cut(work: Work, costs: Costs) -> int:
    """The cut of the least delay; 0 unless another one is worth while."""
    seconds = delays(work, costs)
    cut = int(np.argmin(seconds))
    return cut if seconds[cut] < _WORTH_WHILE * seconds[0] else 0


def delays(work: Work, costs: Costs) -> NDArray[np.float64]:
    """Predicted delay of every cut from 0 to the number of chunks, both included (Eq 4).

    A cut right before a ghost is as good as the one behind it, and counts as endless.
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


def as_runs(chunks: Sequence[Chunk], cut: int) -> list[Run]:
    """A cut as runs; one at the end that is only recomputed is left out."""
    is_loaded = [
        not chunk.is_nowhere and (i >= cut or chunk.ram != ABSENT) for i, chunk in enumerate(chunks)
    ]
    groups = itertools.groupby(zip(is_loaded, chunks, strict=True), key=lambda pair: pair[0])
    found = [Run([chunk for _, chunk in group], loaded) for loaded, group in groups]
    return found if found and found[-1].is_loaded else found[:-1]


def _engine_seconds(
    work: Work, costs: Costs, is_recomputed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """What the engine does for each chunk: evaluates it, in as few calls as possible, or takes it.

    A call is charged to the chunk that it begins with.
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
    """Sums of the first 0, 1, … n values."""
    return np.append(0.0, np.cumsum(values))


def _bytes_to_read(chunk: Chunk) -> int:
    return chunk.size if chunk.ram == ABSENT and chunk.disk != ABSENT else 0
