"""Forks of the process while plugins are active.

A forked child has a copy of its parent's memory, but only one thread: the one that forked. Objects
that own threads, or files that both processes would write to, are notified of every fork: ``watch``
adds such an object. A lock made by ``lock`` is free in a child even if another thread of the parent
held it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Forked", "is_child", "lock", "postponed", "watch"]


class Forked:
    """Object that is notified of forks.

    Before a fork, objects with ``comes_first`` are notified first, then those with ``runs_work``;
    after it, the order is reversed.
    """

    comes_first = False
    runs_work = False

    def before_fork(self) -> None:
        """Reach a state that can be copied."""

    def after_fork(self, *, in_child: bool) -> None:
        """Resume, in the parent or in the child."""


_watched: set[weakref.ref[Forked]] = set()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held = threading.local()
_first_pid = os.getpid()


def is_child() -> bool:
    """Return whether this process was forked from one that had imported this module."""
    return os.getpid() != _first_pid


def watch(one: Forked) -> None:
    """Notify ``one`` of every fork as long as it lives."""
    _register()
    _watched.add(weakref.ref(one, _watched.discard))


def lock() -> Any:
    """Return a reentrant lock that is free in a forked child, unless the forking thread holds it.

    The lock is reentrant because a signal handler may run the same code on the same thread.
    """
    _register()
    made = threading.RLock()
    _locks.add(made)
    return made


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Let forks on other threads wait for the end of the block.

    Objects that the block adds by ``watch`` are then notified. The block must not wait for a thread
    that may fork.
    """
    _register()
    with _postponing.lock:
        yield


class _Postponing(Forked):
    """Lock that blocks hold while forks wait for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _locks.add(self.lock)

    def before_fork(self) -> None:
        self.lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        del in_child
        self.lock.release()


_postponing = _Postponing()


@functools.cache
def _register() -> None:
    # The last registered handler runs first. Thread pools hold a lock of their own during a fork,
    # and work that ``before_fork`` waits for may need a pool: so pools must register before us.
    importlib.import_module("concurrent.futures.thread")
    os.register_at_fork(
        before=_before,
        after_in_parent=functools.partial(_after, in_child=False),
        after_in_child=functools.partial(_after, in_child=True),
    )


def _before() -> None:
    _held.told = []
    _tell(sorted(_alive(), key=lambda one: (not one.comes_first, not one.runs_work)))
    _tell([_postponing])  # last, because who waits to begin a block may hold other objects' locks
    told = set(_held.told)
    _tell(one for one in _alive() if one not in told)  # added by a block that has just ended


def _alive() -> list[Forked]:
    found = (reference() for reference in list(_watched))  # a copy: other threads add objects
    return [one for one in found if one is not None]


def _tell(ones: Iterable[Forked]) -> None:
    for one in ones:
        one.before_fork()
        _held.told.append(one)


def _after(*, in_child: bool) -> None:
    if in_child:
        for one in list(_locks):
            if not one._is_owned():  # noqa: SLF001  as `threading` does after a fork
                one._at_fork_reinit()  # noqa: SLF001
    while _held.told:
        _held.told.pop().after_fork(in_child=in_child)
