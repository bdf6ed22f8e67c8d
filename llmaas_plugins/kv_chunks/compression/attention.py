"""Attention that each chunk of an engine's context receives (LLMS §3.2, Eq 1).

A tap in the engine sums attention by position during evaluation. If the tap fails, the attention
is unknown and reported as zero scores; generated tokens never depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import NativeContext
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS

__all__ = ["AsideAttention", "ChunkAttention"]

ROW_STEP = 8
"""One query in this many is sampled; docs/explanation/engine.md reports the cost and the error.

Skipping layers instead would save as much, with a much larger error, because layers differ.
"""

_UNKNOWN_CELL = -1
"""Cell of a token whose place the tap does not know (native/backend/attention/density_cells.h)."""

_T = TypeVar("_T")
_log = logging.getLogger("llmaas.kv_chunks")


class AsideAttention(NamedTuple):
    """Attention of a request that lies aside or is parked, while the tap sees tokens of others.

    Attributes:
        taken: Result of ``ChunkAttention.take``; None if nothing is left to be counted on.
        cells: Cells of the request's tokens, shape ``(n_layers, n)``; None if they are unknown.
    """

    taken: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    cells: NDArray[np.int32] | None


class ChunkAttention:
    """Attention received by the tokens in sequence 0 of one engine."""

    def __init__(self, context: NativeContext) -> None:
        """Start counting."""
        self._density = _none_on_error(lambda: context.density(row_step=ROW_STEP))
        self._before: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def cells(self, n_tokens: int) -> NDArray[np.int32] | None:
        """Return the cells of the first ``n_tokens`` tokens by layer, or None if they are unknown.

        Pass the result to ``announce`` when those tokens come back. It has shape
        ``(n_layers, n_tokens)`` and stays valid while some sequence has those cells.
        """
        density = self._density
        return None if density is None else _none_on_error(lambda: density.cells(n_tokens))

    def announce(self, kept: int, n_tokens: int, cells: NDArray[np.int32] | None = None) -> None:
        """Announce tokens that enter sequence 0 without evaluation; call this before they do.

        Args:
            kept: Number of leading tokens that stay in their cells.
            n_tokens: End of the tokens that are restored next, in order, from ``kept`` on. Some
                may be evaluated instead; the last ones may come later or never.
            cells: Cells that already hold these tokens, as returned by ``cells``; None if the
                tokens are restored.
        """
        density = self._density
        if kept == 0:
            self._before = None
        if density is not None:
            _none_on_error(lambda: density.place(kept, n_tokens, cells))

    def put_aside(self, n_tokens: int) -> AsideAttention:
        """Return what was counted for the first ``n_tokens`` tokens, and start again."""
        return AsideAttention(self.take(n_tokens), self.cells(n_tokens))

    def bring_back(self, aside: AsideAttention, n_tokens: int) -> None:
        """Go on where ``put_aside`` stopped, with the first ``n_tokens`` tokens.

        Those that were evaluated meanwhile are not counted, and others may have been dropped.
        """
        cells = None if aside.cells is None else aside.cells[:, :n_tokens]
        if cells is not None and cells.shape[1] < n_tokens:
            unknown = np.full((len(cells), n_tokens - cells.shape[1]), _UNKNOWN_CELL, np.int32)
            cells = np.concatenate([cells, unknown], axis=1)
        self.announce(0, n_tokens, cells)
        self._before = aside.taken

    def take(self, n_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return summed attention and score counts per chunk since the last call.

        Both arrays have shape ``(n_chunks,)`` and cover the first ``n_tokens`` tokens, including
        a partial last chunk. A chunk's density is its total attention divided by its total count.
        A count of 0 means that nothing was measured.
        """
        density = self._density
        taken = None if density is None else _none_on_error(lambda: density.take(n_tokens))
        starts = np.arange(0, n_tokens, CHUNK_TOKENS)
        found = np.zeros(len(starts)), np.zeros(len(starts))
        if taken is not None and n_tokens:
            sums, counts = taken
            found = np.add.reduceat(sums, starts), np.add.reduceat(counts.astype(float), starts)
        before, self._before = self._before, None
        if before is not None:
            n = min(len(starts), len(before[0]))
            for total, part in zip(found, before, strict=True):
                total[:n] += part[:n]
        return found

    def close(self) -> None:
        """Stop counting."""
        if self._density is not None:
            self._density.close()


def _none_on_error(use: Callable[[], _T]) -> _T | None:
    try:
        return use()
    except (ReferenceError, RuntimeError, MemoryError, ValueError) as error:
        _log.debug("attention is unknown: %s", error)
        return None
