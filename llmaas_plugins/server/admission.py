"""Admission to the engine: one call runs, and a bounded number of calls wait in turn.

Everything here runs on the server's event loop, except ``end_if_unwanted``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

import anyio

from llmaas_hooks import hookimpl
from llmaas_plugins.server.refusal import Refusal

__all__ = ["Abandoned", "Admission", "Call", "stopping"]


class Abandoned(BaseException):
    """End of the running call; not an ``Exception``, so that no code on the way out catches it."""


@dataclass(eq=False, slots=True)
class Call:
    """A call that runs or waits.

    Attributes:
        app: Name of the calling app; empty if the caller has no name.
        turn: Event that is set when the call may run.
        scope: Cancel scope around everything that the call does.
        is_over: Whether the client left, or the call was ended; its results are then discarded.
        refusal: Answer to the client of a call that was ended.
    """

    app: str
    turn: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_over: bool = False
    refusal: Refusal | None = None

    def end(self, refusal: Refusal | None = None) -> None:
        """End the call: stop waiting, or stop running at the next token."""
        if not self.is_over:
            self.is_over, self.refusal = True, refusal
            self.scope.cancel()


class Admission:
    """Calls in the order of their arrival."""

    def __init__(self, most_waiting: int) -> None:
        """Let ``most_waiting`` calls wait behind the one that runs."""
        self._most = most_waiting
        self.running: Call | None = None
        self.waiting: list[Call] = []
        self.is_stopping = False

    def __len__(self) -> int:
        """Return the number of calls that run or wait."""
        return len(self.waiting) + (self.running is not None)

    def enter(self, app: str) -> Call:
        """Join the queue as ``app``.

        If the queue is full, the app with the most waiting calls loses its latest one. Thus one app
        cannot keep others out, while a single app may use the whole queue.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        self.check(app)
        if self._is_full() and (crowded_out := self._latest_of_the_largest(app)) is not None:
            self._end_waiting(crowded_out, self._full())
        call = Call(app)
        self.waiting.append(call)
        self._next()
        return call

    def check(self, app: str) -> None:
        """Refuse a call that ``enter`` would refuse.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        if self.is_stopping:
            raise stopping()
        if self._is_full() and self._latest_of_the_largest(app) is None:
            raise self._full()

    def leave(self, call: Call) -> None:
        """Remove a call that is done or no longer wants to wait."""
        if call is self.running:
            self.running = None
        elif call in self.waiting:
            self.waiting.remove(call)
        self._next()

    def stop(self) -> None:
        """Let the running call finish, and refuse all others."""
        self.is_stopping = True
        for call in list(self.waiting):
            self._end_waiting(call, stopping())

    def end_running(self) -> None:
        """End the running call."""
        if self.running is not None:
            self.running.end(stopping())

    def refuse_running(self, refusal: Refusal) -> NoReturn:
        """End the running call from within, on the engine's thread.

        Raises:
            Abandoned: Always.
        """
        if self.running is not None and not self.running.is_over:
            self.running.is_over, self.running.refusal = True, refusal
        raise Abandoned

    @hookimpl(specname="llmaas_decode")
    def end_if_unwanted(self) -> None:
        """Stop the running call after a batch if it is over; runs on the engine's thread.

        Tokens evaluated so far stay usable, as after any other error during evaluation.

        Raises:
            Abandoned: The running call is over.
        """
        running = self.running
        if running is not None and running.is_over:
            raise Abandoned

    def _next(self) -> None:
        if self.running is None and self.waiting:
            self.running = self.waiting.pop(0)
            self.running.turn.set()

    def _is_full(self) -> bool:
        return len(self.waiting) >= self._most

    def _full(self) -> Refusal:
        message = (
            f"{len(self.waiting)} calls are waiting for the engine, the limit is {self._most}. "
            "Try again later."
        )
        return Refusal(429, message, "rate_limit_exceeded")

    def _latest_of_the_largest(self, app: str) -> Call | None:
        """Return the call that ``app`` may displace, having fewer calls even with its new one."""
        n_waiting = Counter(call.app for call in self.waiting)
        largest, n_largest = n_waiting.most_common(1)[0]
        if n_largest <= n_waiting[app] + 1:
            return None
        return next(call for call in reversed(self.waiting) if call.app == largest)

    def _end_waiting(self, call: Call, refusal: Refusal) -> None:
        self.waiting.remove(call)  # at once, because its task may notice the end only later
        call.end(refusal)


def stopping() -> Refusal:
    """Return the refusal for calls that the service will not finish."""
    return Refusal(503, "The service is stopping. Try again later.", "service_stopping")
