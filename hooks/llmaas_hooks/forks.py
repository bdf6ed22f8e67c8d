"""Forks of the process while plugins are on.

A forked child has a copy of its parent's memory and one thread: the one that forked. Whoever has
threads, or files that both processes would write to, is told of every fork (``watch``). A lock made
by ``lock`` is free in a child even if another thread of the parent held it.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import weakref
from typing import Any

__all__ = ["Forked", "lock", "watch"]


class Forked:
    """Something that must know of forks. Those that run work are told before those that store."""

    runs_work = False

    def before_fork(self) -> None:
        """Reach a state that can be copied."""

    def after_fork(self, *, in_child: bool) -> None:
        """Go on, in the parent or in the child."""


_watched: set[weakref.ref[Forked]] = set()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held = threading.local()


def watch(one: Forked) -> None:
    """Tell ``one`` of every fork as long as it lives."""
    _register()
    _watched.add(weakref.ref(one, _watched.discard))


def lock() -> Any:
    """Return a reentrant lock that is free in a forked child, unless the forking thread holds it.

    Reentrant, because a signal handler may come back to the same code on the same thread.
    """
    _register()
    made = threading.RLock()
    _locks.add(made)
    return made


@functools.cache
def _register() -> None:
    # Who registers last is told first. The pools of threads hold a lock of theirs during a fork,
    # and work that ``before_fork`` waits for may need a pool.
    importlib.import_module("concurrent.futures.thread")
    os.register_at_fork(
        before=_before,
        after_in_parent=functools.partial(_after, in_child=False),
        after_in_child=functools.partial(_after, in_child=True),
    )


def _before() -> None:
    _held.told = []
    found = (reference() for reference in list(_watched))  # at once: other threads add some
    alive = [one for one in found if one is not None]
    for one in sorted(alive, key=lambda one: not one.runs_work):
        one.before_fork()
        _held.told.append(one)


def _after(*, in_child: bool) -> None:
    if in_child:
        for one in list(_locks):
            if not one._is_owned():
                one._at_fork_reinit()
    while _held.told:
        _held.told.pop().after_fork(in_child=in_child)
