"""Places of requests that lie aside while others use their engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Seat"]


class Seat(Protocol):
    """Place of a request beside the engine: its cells and its state, while others use the engine.

    A thread uses the methods only while no other thread uses the engine. ``leave`` and ``enter``
    copy no cells and take microseconds; without a result of ``evaluate_with``, ``enter`` may give
    all cells of the request other labels.
    """

    @property
    def is_aside(self) -> bool:
        """Whether the request has left the engine."""

    @property
    def can_leave(self) -> bool:
        """Whether the request is in progress, and has room to lie aside."""

    @property
    def level(self) -> int:
        """Index of the level at which the next token is computed; only equal ones go together."""

    def leave(self) -> None:
        """Put the request aside, in whose place others may then use the engine."""

    def enter(self, waited_s: float = 0.0) -> None:
        """Bring the request back, which then goes on.

        Args:
            waited_s: Seconds for which the app has waited for this, if it happens between two
                turns. They count as time in which others used the engine.

        Raises:
            ReferenceError: The engine was closed meanwhile.
        """

    def evaluate_with(self, others: Sequence[Seat]) -> float | None:
        """Evaluate the next token of this request and of others, all aside, in one batch.

        All must be of equal level. Each then finds its token evaluated when it enters. After a
        failure each evaluates its token itself.

        Returns:
            Seconds that it took; None if it failed.

        Raises:
            ValueError: The levels differ.
        """
