"""The line before the engine: one call runs, a bounded number waits, each in its turn.

Everything here happens on the server's event loop, except ``end_if_unwanted``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

import anyio

from llmaas_hooks import hookimpl
from llmaas_plugins.service.refusal import Refusal

__all__ = ["Abandoned", "Call", "Line", "stopping"]


class Abandoned(BaseException):
    """The running call ends here. Not an ``Exception``: nobody on its way out may mistake it."""


@dataclass(eq=False, slots=True)
class Call:
    """A call that runs or waits.

    Attributes:
        app: Whose it is; empty for a caller without a name.
        turn: Set when it may run.
        scope: Everything it does.
        is_over: Its client left, or it was ended; what it still does is for nobody.
        refusal: What its client is told then.
    """

    app: str
    turn: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_over: bool = False
    refusal: Refusal | None = None

    def end(self, refusal: Refusal | None = None) -> None:
        """Stop waiting, or stop running at the next token."""
        if not self.is_over:
            self.is_over, self.refusal = True, refusal
            self.scope.cancel()


class Line:
    """Calls in the order they came."""

    def __init__(self, most_waiting: int) -> None:
        """Let ``most_waiting`` calls wait behind the one that runs."""
        self._most = most_waiting
        self.running: Call | None = None
        self.waiting: list[Call] = []
        self.is_stopping = False

    def __len__(self) -> int:
        """Calls that run or wait."""
        return len(self.waiting) + (self.running is not None)

    def enter(self, app: str) -> Call:
        """Join as ``app``.

        When the line is full, the app with the most calls in it gives its latest one up: one app
        cannot keep the others out, and one that is alone has the whole line.

        Raises:
            Refusal: The line is full, or the service is stopping.
        """
        self.check(app)
        if self._is_full() and (crowded_out := self._latest_of_the_largest(app)) is not None:
            self._end_waiting(crowded_out, self._full())
        call = Call(app)
        self.waiting.append(call)
        self._next()
        return call

    def check(self, app: str) -> None:
        """Refuse now what ``enter`` would refuse.

        Raises:
            Refusal: As ``enter``.
        """
        if self.is_stopping:
            raise stopping()
        if self._is_full() and self._latest_of_the_largest(app) is None:
            raise self._full()

    def leave(self, call: Call) -> None:
        """The call is done, or does not want to wait any longer."""
        if call is self.running:
            self.running = None
        elif call in self.waiting:
            self.waiting.remove(call)
        self._next()

    def stop(self) -> None:
        """Let the running call finish; nobody else gets a turn."""
        self.is_stopping = True
        for call in list(self.waiting):
            self._end_waiting(call, stopping())

    def end_running(self) -> None:
        """End the call that runs."""
        if self.running is not None:
            self.running.end(stopping())

    def refuse_running(self, refusal: Refusal) -> NoReturn:
        """End the running call from within, on the engine's thread.

        Raises:
            Abandoned: In any case; nobody on its way out may mistake it.
        """
        if self.running is not None and not self.running.is_over:
            self.running.is_over, self.running.refusal = True, refusal
        raise Abandoned

    @hookimpl(specname="llmaas_decode")
    def end_if_unwanted(self) -> None:
        """After each batch, on the engine's thread: go no further for nobody.

        What was evaluated stays usable, as after any other error in an evaluation.

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
            f"{len(self.waiting)} calls wait for the engine, the limit is {self._most}. "
            "Try again later."
        )
        return Refusal(429, message, "rate_limit_exceeded")

    def _latest_of_the_largest(self, app: str) -> Call | None:
        """The call that ``app`` may take the place of, having fewer even then."""
        n_waiting = Counter(call.app for call in self.waiting)
        largest, n_largest = n_waiting.most_common(1)[0]
        if n_largest <= n_waiting[app] + 1:
            return None
        return next(call for call in reversed(self.waiting) if call.app == largest)

    def _end_waiting(self, call: Call, refusal: Refusal) -> None:
        self.waiting.remove(call)  # now: its task may take a while to notice
        call.end(refusal)


def stopping() -> Refusal:
    """The answer to calls that the service will not finish."""
    return Refusal(503, "The service is stopping. Try again later.", "service_stopping")
