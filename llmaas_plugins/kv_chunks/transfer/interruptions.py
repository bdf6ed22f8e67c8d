"""State that one engine's interrupted requests need before others use its cells.

The next request on the engine waits until an interrupted one is saved. So a request whose cells
will stay in the engine is saved only when many of its tokens are not. If such cells are lost after
all, these tokens are evaluated again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmaas_hooks import Tokens
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts

__all__ = ["Interrupted", "Interruptions"]

_MOST_UNSAVED = 128
"""Tokens of an interrupted request that may be evaluated again if its parked cells are lost."""


class Interrupted(NamedTuple):
    """Request that others interrupt.

    Attributes:
        tokens: Tokens in sequence 0, shape ``(n,)``.
        context_id: Name of the persistent context that ends with them, or None.
        app: Name of the app that the tokens belong to, or None.
        is_saved: Whether all of them are being saved.
    """

    tokens: Tokens
    context_id: str | None
    app: str | None
    is_saved: bool


class Interruptions:
    """Interruptions of one engine's requests. Use it only while no other thread uses the engine."""

    def __init__(self, parking: ParkedContexts | None, *, is_exact: bool) -> None:
        """Start without any.

        Args:
            parking: Parked contexts of the engine; None if none stay in it.
            is_exact: Whether no token may be evaluated again, as batches are then split otherwise.
        """
        self._parking = parking
        self._most_unsaved = 0 if is_exact else _MOST_UNSAVED
        self._last: Interrupted | None = None
        self._n_given_up = 0
        self._keeps_cells = True  # the last one that came back had its cells

    def begin(
        self, tokens: Tokens, context_id: str | None, app: str | None, n_saved: int | None
    ) -> bool:
        """Note that a request is interrupted; return whether it need not be saved now.

        Args:
            tokens: Tokens in sequence 0.
            context_id: Name of the persistent context that ends with them, or None.
            app: Name of the app that the tokens belong to, or None.
            n_saved: Number of its tokens that are stored already; None if its cells may be lost. A
                request that comes back from its seat drops them without any switch.
        """
        stays = self._keeps_cells and n_saved is not None
        may_wait = stays and len(tokens) - (n_saved or 0) < self._most_unsaved
        self._last = Interrupted(tokens, context_id, app, not may_wait)
        return may_wait

    def take(self, resident: Tokens) -> Interrupted | None:
        """Return the request that was interrupted last, if sequence 0 still has its cells."""
        last, self._last = self._last, None
        return last if last is not None and np.array_equal(last.tokens, resident) else None

    def switched(self, *, is_resumed: bool) -> None:
        """Learn from a switch, in which a parked context came back or did not.

        If the host has emptied parked sequences meanwhile, interrupted requests are saved at once
        from now on, until one comes back that still has its cells.
        """
        assert self._parking is not None
        n_before, self._n_given_up = self._n_given_up, self._parking.n_given_up
        self._keeps_cells = self._n_given_up == n_before and (self._keeps_cells or is_resumed)
