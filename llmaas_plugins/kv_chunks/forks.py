"""What a forked child does with its parent's stores: nothing on disk."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

__all__ = ["Forked", "watch"]


class Forked(Protocol):
    """Something that both sides of a fork would otherwise write to."""

    def before_fork(self) -> None:
        """Be in a state that can be copied."""

    def after_fork(self, *, in_child: bool) -> None:
        """Go on, in the parent or in the child."""


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()
_held: list[Forked] = []


def watch(store: Forked) -> None:
    """Tell ``store`` of every fork as long as it lives."""
    _register()
    _watched.add(store)


@functools.cache
def _register() -> None:
    os.register_at_fork(
        before=_before,
        after_in_parent=functools.partial(_after, in_child=False),
        after_in_child=functools.partial(_after, in_child=True),
    )


def _before() -> None:
    for store in list(_watched):
        store.before_fork()
        _held.append(store)


def _after(*, in_child: bool) -> None:
    while _held:
        _held.pop().after_fork(in_child=in_child)
