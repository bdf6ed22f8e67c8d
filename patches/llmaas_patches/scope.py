"""Whose the requests of a thread or task are, and which plugins they do without."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["current_context", "declined_plugins", "serving_context", "without"]

current_context: contextvars.ContextVar[tuple[str | None, str | None]] = contextvars.ContextVar(
    "llmaas_current_context", default=(None, None)
)
"""Persistent context and app that the ``Llama.generate`` calls of this thread or task belong to."""


@contextmanager
def serving_context(context_id: str | None, app: str | None = None) -> Iterator[None]:
    """Name the persistent context and the app for the requests started inside the block."""
    token = current_context.set((context_id, app))
    try:
        yield
    finally:
        current_context.reset(token)


declined_plugins: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "llmaas_declined_plugins", default=frozenset()
)
"""Plugins that the ``Llama.generate`` calls of this thread or task do without."""


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Let the requests that are started inside the block do without these plugins, too."""
    token = declined_plugins.set(declined_plugins.get() | frozenset(names))
    try:
        yield
    finally:
        declined_plugins.reset(token)
