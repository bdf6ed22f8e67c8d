"""How much attention the chunks of an engine's context get (LLMS §3.2, Eq 1).

The engine's tap adds it up by position while it computes. Where that fails, nobody knows how much
it was: an answer never depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import NativeContext
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS

__all__ = ["ChunkAttention"]

ROW_STEP = 8
"""Queries of which one is looked at; docs/engine.md has what that costs and how far it is off.

Leaving out layers instead is cheaper by as much and much further off: layers differ.
"""

_T = TypeVar("_T")
_log = logging.getLogger("llmaas.kv_chunks")


class ChunkAttention:
    """Attention to sequence 0 of one engine."""

    def __init__(self, context: NativeContext) -> None:
        """Count from now on."""
        self._density = _unless_gone(lambda: context.density(row_step=ROW_STEP))

    def cells(self, n_tokens: int) -> NDArray[np.int32] | None:
        """Where the first tokens lie, for the day they come back; None if nobody knows.

        Shape ``(n_layers, n_tokens)``. It holds as long as some sequence has those cells.
        """
        density = self._density
        return None if density is None else _unless_gone(lambda: density.cells(n_tokens))

    def placed(self, kept: int, n_tokens: int, cells: NDArray[np.int32] | None = None) -> None:
        """Tokens come into sequence 0 otherwise than by evaluation; call it before they do.

        Args:
            kept: Tokens that stay where they are.
            n_tokens: Those from ``kept`` on are restored next, in order; some of them may be
                evaluated instead, and the last ones come later or not at all.
            cells: They are not restored but lie there, as ``cells`` told.
        """
        density = self._density
        if density is not None:
            _unless_gone(lambda: density.place(kept, n_tokens, cells))

    def take(self, n_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Attention since the last call to each chunk of the first tokens, and scores it sums.

        Shape ``(n_chunks,)`` each, a partial chunk included. The density is their ratio, over a
        chunk's whole life that of their totals; nobody looked at a chunk without scores.
        """
        density = self._density
        taken = None if density is None else _unless_gone(lambda: density.take(n_tokens))
        starts = np.arange(0, n_tokens, CHUNK_TOKENS)
        if taken is None or not n_tokens:
            return np.zeros(len(starts)), np.zeros(len(starts))
        sums, counts = taken
        return np.add.reduceat(sums, starts), np.add.reduceat(counts.astype(np.float64), starts)

    def close(self) -> None:
        """Stop counting."""
        if self._density is not None:
            self._density.close()


def _unless_gone(use: Callable[[], _T]) -> _T | None:
    try:
        return use()
    except (ReferenceError, RuntimeError, MemoryError, ValueError) as error:
        _log.debug("no attention is known: %s", error)
        return None
