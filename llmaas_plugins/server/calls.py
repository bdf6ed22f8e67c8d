"""A call to the server, from its arrival to its end."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from llmaas_hooks import NO_PROMISE, Promise, Seat
from llmaas_plugins.server.prompt_pieces import PromptTimes
from llmaas_plugins.server.refusal import Refusal

if TYPE_CHECKING:
    from llmaas_plugins.server.grammars import Running

__all__ = ["Call", "Stage", "Stream"]

Stream = Generator[Any, Any, Any]
_LEAST_OWN = 4
"""Turns of an answer from which on its own token time counts, in place of the app's mean."""


class Stage(enum.Enum):
    """Reason for which a call lies aside while others use the engine."""

    PIECE = enum.auto()  # a piece of its prompt is to be evaluated
    TOKEN = enum.auto()  # its next token is to be evaluated
    READY = enum.auto()  # its next token is evaluated
    AWAY = enum.auto()  # a piece of its text is on its way to the client
    BACK = enum.auto()  # the piece is sent
    ALONE = enum.auto()  # it has the engine to itself once all that are READY have sampled


@dataclass(eq=False, slots=True)
class Call:
    """A call that runs or waits.

    Attributes:
        app: Name of the calling app; empty if the caller has no name.
        promise: Latency that is asked for.
        context: Name of the persistent context; empty without one. Calls in one context run one
            after the other.
        came_s: Time of its arrival.
        turn: Event that is set when the call may run.
        scope: Cancel scope around everything that the call does.
        is_over: Whether the client left, or the call was ended; its results are then discarded.
        refusal: Answer to the client of a call that was ended.
        completion: Generator that serves the call, if it has begun one.
        loop: Event loop of the call's task.
        resumed: Event that is set when a call that was interrupted may go on.
        prompt_times: Times of the prompt that is evaluated.
        n_piece: Most prompt tokens that are evaluated at once; 0 before the first turn.
        n_generated: Number of turns in the answer, of one token each.
        first_s: Time of the first turn in the answer, when there is a token; None before.
        first_used_s: Seconds on the engine until then.
        used_s: Seconds that the call has used the engine.
        since_s: Time from which the call uses the engine.
        seat: Place of the call while others use the engine.
        stage: Reason for which it is there.
        is_shared: Whether its tokens are decoded with others', which also use the engine while a
            piece of its text is on its way; if not, it has the engine to itself.
        away_since_s: Time from which a piece of text is on its way; None while the call works.
        is_done: Whether only its answer is still to be sent.
        is_judged: Whether a request of it has ended on the engine, where its promise is judged.
        grammar: Grammar that constrains its answer.
    """

    app: str
    promise: Promise = NO_PROMISE
    context: str = ""
    came_s: float = field(default_factory=time.perf_counter)
    turn: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_over: bool = False
    refusal: Refusal | None = None
    completion: object = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    resumed: threading.Event = field(default_factory=threading.Event)
    prompt_times: PromptTimes = field(default_factory=PromptTimes)
    n_piece: int = 0
    n_generated: int = 0
    first_s: float | None = None
    first_used_s: float | None = None
    used_s: float = 0.0
    since_s: float = 0.0
    seat: Seat | None = None
    stage: Stage | None = None
    is_shared: bool = True
    away_since_s: float | None = None
    is_done: bool = False
    is_judged: bool = False
    grammar: Running | None = None

    def run(self) -> None:
        """Let the call run, from any thread."""
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_here = False
        if is_here:
            self.turn.set()
        else:
            self.loop.call_soon_threadsafe(self.turn.set)

    def end(self, refusal: Refusal | None = None) -> None:
        """End the call: stop waiting, or stop running at the next token."""
        if not self.is_over:
            self.is_over, self.refusal = True, refusal
            self.scope.cancel()

    def constrain(self, grammar: Running | None) -> None:
        """Follow a grammar from now on, or none; the one before ends."""
        before, self.grammar = self.grammar, grammar
        if before is not None:
            before.close()

    def used(self, now_s: float) -> float:
        """Return the seconds for which the call has used the engine, of which it has the turn."""
        return self.used_s + now_s - self.since_s

    def stage_aside(self, n_left: int) -> Stage:
        """Return why the call lies aside in its turn, with so many tokens of its prompt left."""
        if not self.is_shared:
            return Stage.ALONE
        return Stage.PIECE if n_left else Stage.TOKEN

    def is_due_at(self, level: int) -> bool:
        """Return whether its next token is evaluated in a batch of this level, if it is aside."""
        is_due = self.stage is Stage.TOKEN and not self.is_over
        return is_due and self.seat is not None and self.seat.level == level

    def token_s(self, used_s: float) -> float | None:
        """Return the mean seconds of a token after the first; None if there were too few."""
        if self.n_generated < _LEAST_OWN or self.first_used_s is None:
            return None
        return (used_s - self.first_used_s) / (self.n_generated - 1)
