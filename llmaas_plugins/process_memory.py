"""Memory limit of the process: who keeps it, and who holds memory that can be given back.

Plugins do not import each other, so they meet here. A plugin with a limit for the whole process
keeps a ``Limit``. A plugin with memory that may grow and shrink asks for a grant before it grows,
and is told to release memory when the process needs it for something else.

Locks: ``grant`` and ``room`` may take a limit's lock and ``release`` may take a user's. So a user
must not ask while it holds the lock that its ``release`` takes, and a limit must not call
``release`` while it holds its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Protocol, TypeVar

from llmaas_hooks import UnmetBudgetError
from llmaas_plugins.machine import available_bytes, release_memory, resident_bytes

__all__ = [
    "SPARE_BYTES",
    "Keeper",
    "Limit",
    "User",
    "add_keeper",
    "add_limit",
    "add_user",
    "beside_others",
    "budget",
    "enforce",
    "grant",
    "has_other_limits",
    "obtainable_bytes",
    "promised",
    "refresh",
    "releasable",
    "release",
    "remove_keeper",
    "remove_limit",
    "reserved",
    "room",
]

SPARE_BYTES = 6 << 20
"""Reserve for memory that nobody asks for: the app's own objects, the logits of a batch."""
_SHARE = 0.9
"""Share of the available memory to use; the rest is left to other processes."""


class Limit(Protocol):
    """Keeper of a limit for the memory of the whole process."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that this keeper itself holds, which may change at any time."""

    def room(self) -> int | None:
        """Return the bytes that users may still take, or None if there is no limit now."""

    def grant(self, n_bytes: int) -> int:
        """Make room for up to ``n_bytes`` more; return the bytes that may be taken."""

    def refresh(self) -> None:
        """Look what memory is in use now; may wait until that is known."""

    def enforce(self, *, waits: bool) -> None:
        """Release what this keeper itself holds above the limit; may wait until it can."""


class Keeper(Protocol):
    """Keeper of the memory budget of the process."""

    @property
    def in_force(self) -> int:
        """Bytes that the process may take now."""


class User(Protocol):
    """Holder of memory that can be given back."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it holds now."""

    @property
    def releasable_bytes(self) -> int:
        """Bytes that can be given back; they were granted, whether they take memory yet or not."""

    @property
    def promised_bytes(self) -> int:
        """Bytes that were granted and take no memory yet."""

    def release(self, n_bytes: int) -> int:
        """Give back ``n_bytes``, or all that can be given back; return the bytes given back."""


_T = TypeVar("_T")

_limits: set[weakref.ref[Limit]] = set()
_users: set[weakref.ref[User]] = set()
_keepers: set[weakref.ref[Keeper]] = set()


def obtainable_bytes() -> int:
    """Return the bytes that the process may use now if no budget is set."""
    return int(_SHARE * available_bytes())


def add_keeper(keeper: Keeper) -> None:
    """Let the process have the budget of ``keeper``, as long as it lives and is not removed."""
    _keepers.add(weakref.ref(keeper, _keepers.discard))


def remove_keeper(keeper: Keeper) -> None:
    """Forget the budget of ``keeper``."""
    _keepers.discard(weakref.ref(keeper))


def budget() -> int | None:
    """Return the memory budget of the process, or None."""
    return min((keeper.in_force for keeper in _alive(_keepers)), default=None)


def add_limit(limit: Limit) -> None:
    """Let users ask this limit, as long as it lives and is not removed."""
    _limits.add(weakref.ref(limit, _limits.discard))


def remove_limit(limit: Limit) -> None:
    """Stop asking this limit."""
    _limits.discard(weakref.ref(limit))


def add_user(user: User) -> None:
    """Let limits count the memory of ``user``, as long as it lives."""
    _users.add(weakref.ref(user, _users.discard))


def has_other_limits(limit: Limit) -> bool:
    """Return whether users ask other limits than this one."""
    return any(one is not limit for one in _alive(_limits))


def room() -> int | None:
    """Return the bytes that users may still take, or None if the process has no limit."""
    found = [one for limit in _alive(_limits) if (one := limit.room()) is not None]
    return min(found, default=None)


def grant(n_bytes: int) -> int:
    """Make room for up to ``n_bytes`` more; return the bytes that a user may take now."""
    return min((limit.grant(n_bytes) for limit in _alive(_limits)), default=n_bytes)


def refresh() -> None:
    """Let each limit look what memory is in use now."""
    for limit in _alive(_limits):
        limit.refresh()


def enforce(*, waits: bool) -> None:
    """Let each limit release what its keeper holds above it, with ``waits`` before this returns."""
    for limit in _alive(_limits):
        limit.enforce(waits=waits)


def releasable() -> int:
    """Return the bytes that all users can give back."""
    return sum(user.releasable_bytes for user in _alive(_users))


def promised() -> int:
    """Return the bytes that were granted and take no memory yet."""
    return sum(user.promised_bytes for user in _alive(_users))


def release(n_bytes: int) -> int:
    """Let users give back ``n_bytes``, or as many as they can; return the bytes given back."""
    released = 0
    for user in _alive(_users):
        if released < n_bytes:
            released += user.release(n_bytes - released)
    return released


class _Reservation:
    """User whose memory is promised to work that is going on, as far as it did not take it yet.

    Memory that limits and users take or give back meanwhile does not count as the work's. All other
    growth of the process does.
    """

    held_bytes = releasable_bytes = 0

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._before = n_bytes, beside_others()

    @property
    def promised_bytes(self) -> int:
        taken = max(0, beside_others() - self._before)
        return max(0, self._n_bytes - taken)

    def release(self, n_bytes: int) -> int:
        del n_bytes
        return 0


def beside_others() -> int:
    """Return the bytes of the process that neither limits nor users hold."""
    holders: list[Limit | User] = [*_alive(_limits), *_alive(_users)]
    return resident_bytes() - sum(holder.held_bytes for holder in holders)


@contextlib.contextmanager
def reserved(n_bytes: int, what: str) -> Iterator[None]:
    """Let others make room for work in the block, and keep it free until the block ends.

    Args:
        n_bytes: Memory that the work takes at most, in bytes.
        what: Name of the work, for the error.

    Raises:
        UnmetBudgetError: The others cannot make enough room.
    """
    found = room()
    if found is None:
        yield
        return
    most = found + releasable()
    if found < n_bytes <= most:  # else nothing is released in vain
        found += release(n_bytes - found)
    granted = grant(n_bytes) if found >= n_bytes else max(0, most)
    if granted < n_bytes:
        raise UnmetBudgetError(
            f"{what} takes up to {-(-n_bytes >> 20)} MiB, and the memory budget leaves "
            f"{granted >> 20} MiB. Raise the budget, or do it with `llmaas` in a process of its "
            "own.",
            n_bytes - granted,
        )
    reservation = _Reservation(n_bytes)
    add_user(reservation)
    try:
        yield
    finally:
        del reservation
        release_memory()


def _alive(references: set[weakref.ref[_T]]) -> list[_T]:
    found = (reference() for reference in list(references))  # a copy: other threads add and remove
    return [one for one in found if one is not None]
