"""Context and app of the requests of a thread or task, and plugins that they do without."""

from __future__ import annotations

import contextvars
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = [
    "current_context",
    "declined_plugins",
    "in_its_blocks",
    "serving_app",
    "serving_context",
    "without",
]

_Yield = TypeVar("_Yield")
_Send = TypeVar("_Send")
_Return = TypeVar("_Return")

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


def serving_app() -> str | None:
    """Return the app that ``serving_context`` named; None if it named none."""
    return current_context.get()[1]


declined_plugins: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "llmaas_declined_plugins", default=frozenset()
)
"""Plugins that the ``Llama.generate`` calls of this thread or task do without."""


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Let requests that are started inside the block also do without these plugins."""
    token = declined_plugins.set(declined_plugins.get() | frozenset(names))
    try:
        yield
    finally:
        declined_plugins.reset(token)


def in_its_blocks(
    generator: Generator[_Yield, _Send | None, _Return],
) -> Generator[_Yield, _Send | None, _Return]:
    """Run a generator in the blocks that are open now, even if another thread or task runs it."""
    context = contextvars.copy_context()

    def steps() -> Generator[_Yield, _Send | None, _Return]:
        reply = None
        try:
            while True:
                try:
                    found = context.run(generator.send, reply)
                except StopIteration as end:
                    value: _Return = end.value
                    return value
                reply = yield found
        finally:
            context.run(generator.close)

    return steps()
