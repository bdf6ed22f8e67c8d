"""Limit on the number of connections: a new one replaces the one that may go first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["LimitedConnection", "make_room"]


class LimitedConnection(Protocol):
    """Connection that counts for the limit.

    Attributes:
        is_dropped: Whether it was dropped for another one, and counts no longer.
    """

    is_dropped: bool

    def may_go(self) -> bool:
        """Return whether the connection can be dropped for a new one."""

    def rank(self) -> tuple[bool, float]:
        """Return the connection's place in the order in which connections are dropped."""

    def drop(self) -> None:
        """Close the connection."""


def make_room(connections: Iterable[Any], newcomer: LimitedConnection, most: int) -> None:
    """Drop a connection if there are more than ``most``: ``newcomer`` if no other one may go."""
    counted: list[LimitedConnection] = [found for found in connections if not found.is_dropped]
    if len(counted) > most:
        idle = [found for found in counted if found is not newcomer and found.may_go()]
        min(idle, key=lambda found: found.rank(), default=newcomer).drop()
