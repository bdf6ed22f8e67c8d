"""Scope of requests: what the ``with`` blocks around a call say about the requests made in them.

A scope belongs to one thread or task (``contextvars``). The host reads it once when a request is
made and writes it into the ``Request``, so plugins need no state of their own for it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from llmaas_hooks.levels import Levels
from llmaas_hooks.promises import NO_PROMISE, Promise

__all__ = [
    "MOST_NAME_BYTES",
    "RequestScope",
    "at_levels",
    "check",
    "checked_by",
    "current",
    "entered",
    "keep_scope",
    "noting",
    "promising",
    "serving_context",
    "without",
]

_Yield = TypeVar("_Yield")
_Send = TypeVar("_Send")
_Return = TypeVar("_Return")
MOST_NAME_BYTES = 1 << 16
"""Most bytes, in UTF-8, of the name of a context or of an app."""


class RequestScope(NamedTuple):
    """Facts about the requests that a thread or task makes.

    Attributes:
        context_id: Name of the persistent context; None for stateless requests.
        app: Name of the app; None if it is unknown.
        declined: Names of plugins that the requests do without.
        levels: Levels that the app asks for.
        promise: Latency that the app asks for.
        notes: Reports of plugins about the last request, by the plugin's name, for the one who made
            it; None if nobody reads them.
    """

    context_id: str | None = None
    app: str | None = None
    declined: frozenset[str] = frozenset()
    levels: Levels = Levels()
    promise: Promise = NO_PROMISE
    notes: dict[str, Any] | None = None


_NO_BLOCKS = RequestScope()
_scope: contextvars.ContextVar[RequestScope] = contextvars.ContextVar(
    "llmaas_request_scope", default=_NO_BLOCKS
)

_check: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar(
    "llmaas_request_check", default=None
)


def current() -> RequestScope:
    """Return the scope of this thread or task."""
    return _scope.get()


@contextmanager
def entered(scope: RequestScope) -> Iterator[None]:
    """Use ``scope`` inside the block."""
    outer, token = _scope.get(), None
    try:
        token = _scope.set(scope)  # inside, because Ctrl-C may come right after it
        yield
    except GeneratorExit:  # maybe later, inside of another block
        if _scope.get() is not scope:
            outer, token = _scope.get(), None
        raise
    finally:
        if token is None:
            _scope.set(outer)
        else:
            with suppress(ValueError):  # another thread or task, which keeps its own scope
                _scope.reset(token)


@contextmanager
def serving_context(context_id: str | None, app: str | None = None) -> Iterator[None]:
    """Name the persistent context and the app for the requests started inside the block.

    Raises:
        TypeError: A name is no text.
        ValueError: A name cannot be stored: it has more than 65,536 bytes, or is no Unicode text.
    """
    for kind, name in (("context", context_id), ("app", app)):
        if name is not None:
            _check_name(kind, name)
    with entered(current()._replace(context_id=context_id, app=app)):
        yield


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{kind} name {name!r}: expected text, found {type(name).__name__}")
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{kind} name {name[:40]!a}: expected text in Unicode; {error.reason}"
        ) from None
    if n_bytes > MOST_NAME_BYTES:
        raise ValueError(
            f"{kind} name {name[:40]!r}…: expected at most {MOST_NAME_BYTES} bytes in UTF-8, "
            f"found {n_bytes}"
        )


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let the requests started inside the block also do without these plugins."""
    scope = current()
    with entered(scope._replace(declined=scope.declined.union(names))):
        yield


@contextmanager
def at_levels(levels: Levels) -> Iterator[None]:
    """Ask for levels inside the block; where ``levels`` has None, the outer block's level stays."""
    scope = current()
    with entered(scope._replace(levels=levels.over(scope.levels))):
        yield


@contextmanager
def promising(promise: Promise) -> Iterator[None]:
    """Ask for a latency inside the block; where ``promise`` has None, the outer block's stays."""
    scope = current()
    with entered(scope._replace(promise=promise.over(scope.promise))):
        yield


@contextmanager
def noting() -> Iterator[dict[str, Any]]:
    """Yield a dictionary into which plugins write reports about requests made in the block."""
    notes: dict[str, Any] = {}
    with entered(current()._replace(notes=notes)):
        yield notes


@contextmanager
def checked_by(check: Callable[[], None]) -> Iterator[None]:
    """Let plugins ask inside the block whether requests go on: ``check`` raises if they do not."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check() -> None:
    """Raise if nobody waits for the request any more.

    Plugins call this between the parts of long work for it.

    Raises:
        BaseException: The exception with which the server ends the request.
    """
    if (found := _check.get()) is not None:
        found()


def keep_scope(
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
