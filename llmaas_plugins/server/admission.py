"""Admission to the engine: one call runs, and a bounded number of calls wait for their turn.

Without promised latencies, calls run in the order of their arrival, each to its end. With them, the
order is that of ``schedule``, and a call may be interrupted between the parts of its prompt or
between two tokens. Its thread then waits inside the hook ``llmaas_turn``.

The event loop calls everything here, except the hooks and ``refuse_running``: these run on the
thread of the running call.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from llmaas_hooks import (
    NO_PROMISE,
    ContextCreate,
    DecodeStep,
    Levels,
    Promise,
    Request,
    RequestCost,
    hookimpl,
)
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.calls import Call, Stream
from llmaas_plugins.server.estimates import Estimates
from llmaas_plugins.server.prompt_pieces import PromptTimes, piece_of
from llmaas_plugins.server.refusal import Refusal, stopping
from llmaas_plugins.server.schedule import Job, first_due, interrupting, room_s

__all__ = ["Abandoned", "Admission", "check_wanted"]

_MOST_INTERRUPTED = 8
"""Most calls that wait in the middle of their work; each of them occupies a thread."""


class Abandoned(BaseException):
    """End of the running call; not an ``Exception``, so that no code on the way out catches it."""


class Admission:
    """Calls that run, wait, or were interrupted."""

    def __init__(self, config: ServiceConfig) -> None:
        """Let ``config.max_queue`` calls wait behind the one that runs."""
        self._most = config.max_queue
        self._config = config
        self._lock = threading.RLock()
        self._estimates = Estimates()
        self._has_promises = False
        self.n_interruptions = self.n_missed = 0
        self.running: Call | None = None
        self.waiting: list[Call] = []
        self.interrupted: list[Call] = []
        self.elsewhere: set[Call] = set()  # those that the cloud answers, without the engine
        self.is_stopping = False
        self._ctx: int | None = None  # that of the last request

    @property
    def pressure(self) -> float:
        """Share of the promised latencies that calls leave for others."""
        return self._estimates.pressure

    def __len__(self) -> int:
        """Return the number of calls that run or wait."""
        with self._lock:
            return len(self.waiting) + len(self.interrupted) + self.n_running

    @property
    def n_running(self) -> int:
        """Number of calls that run."""
        return int(self.running is not None)

    def enter(self, app: str, promise: Promise = NO_PROMISE, *, context: str = "") -> Call:
        """Join the queue as ``app``.

        If the queue is full, the app with the most waiting calls loses its latest one. Thus one app
        cannot keep others out, while a single app may use the whole queue.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        call = Call(app, promise, context)
        with self._lock:
            self.check(app)
            if self._is_full() and (crowded_out := self._latest_of_the_largest(app)) is not None:
                self._end_waiting(crowded_out, self._full())
            self._has_promises = self._has_promises or bool(promise)
            if self._has_promises and self.running is not None:
                self._estimates.meet()
            self.waiting.append(call)
            try:
                self._next()
            except BaseException:  # of a call that it puts aside
                self.waiting.remove(call)
                raise
        return call

    def check(self, app: str) -> None:
        """Refuse a call that ``enter`` would refuse.

        Raises:
            Refusal: The queue is full, or the service is stopping.
        """
        if self.is_stopping:
            raise stopping()
        with self._lock:
            if self._is_full() and self._latest_of_the_largest(app) is None:
                raise self._full()

    def begun(self, call: Call) -> Promise:
        """Return how long a call waited, and the time to leave for other calls."""
        now_s = time.perf_counter()
        with self._lock:
            waited_s = now_s - call.came_s
            if self._config.schedule == "fifo":
                return Promise(waited_s=waited_s)
            behind = [self._job(one, now_s) for one in self._behind() if one.promise]
            return Promise(
                waited_s=waited_s,
                room_s=room_s(behind, now_s),
                pressure=self._estimates.pressure,
            )

    def leave(self, call: Call, notes: Mapping[str, Any] | None = None) -> None:
        """Remove a call that is done or no longer wants to wait; learn from notes about it."""
        with self._lock:
            try:
                if call is self.running:
                    self.running = None
                    self._estimates.learn(call, notes or {})
                    if call.is_over and not call.is_judged:  # its client left in this moment
                        self._count_late(call)
                elif call in self.waiting:
                    self._leave_waiting(call)
            finally:
                self._next()

    def report(self) -> dict[str, Any]:
        """Return the counters of the status, as plain JSON types."""
        counts = {"interruptions": self.n_interruptions, "missed_in_queue": self.n_missed}
        return {**counts, "pressure": self.pressure}

    def has_begun(self, call: Call) -> bool:
        """Return whether a call uses the engine."""
        return call is self.running

    def close(self, call: Call) -> None:
        """Close the completion of a call that has begun."""
        completion: Any = call.completion
        completion.close()

    def shared(self, _: Call | None, stream: Stream, *, is_last: bool) -> Stream:
        """Return a stream for its client, which has the engine until the stream's end.

        Args:
            stream: Pieces of an answer.
            is_last: Whether the call makes no other stream.
        """
        del is_last
        return stream

    def stop(self) -> None:
        """Let the calls that have begun finish, and refuse all others."""
        self.is_stopping = True
        with self._lock:
            for call in list(self.waiting):
                self._end_waiting(call, stopping())

    def end_running(self) -> None:
        """End the calls that have begun."""
        with self._lock:
            for call in (self.running, *self.interrupted, *self.elsewhere):
                if call is not None:
                    call.end(stopping())

    def refuse_running(self, refusal: Refusal) -> NoReturn:
        """End the running call from within, on the engine's thread.

        Raises:
            Abandoned: Always.
        """
        if self.running is not None and not self.running.is_over:
            self.running.is_over, self.running.refusal = True, refusal
        raise Abandoned

    @hookimpl(tryfirst=True)
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Say whether requests on a context may be interrupted, as their cells then stay in it."""
        create.takes_turns = self._interrupts

    @hookimpl(specname="llmaas_decode")
    def end_if_unwanted(self, step: DecodeStep) -> None:
        """Stop the running call after a batch of it if it is over; evaluated tokens stay usable.

        Raises:
            Abandoned: The running call is over.
        """
        running = self.running
        if running is not None and running.is_over and self._is_ours(step):
            raise Abandoned

    @hookimpl
    def llmaas_request_end(self) -> None:
        """Note that the running call's promise is judged, as that of a request."""
        if self.running is not None:
            self.running.is_judged = True

    @hookimpl
    def llmaas_level(self, cost: Callable[[], RequestCost]) -> None:
        """Ask how long a call's prompt takes at each level, if others may go between its pieces."""
        if self.running is not None and self._takes_turns:
            self.running.prompt_times = PromptTimes(cost().levels)

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Learn the context of the calls, and the level of a call's prompt."""
        self._ctx = request.engine.ctx
        if self.running is not None and self._takes_turns:
            self.running.prompt_times = self.running.prompt_times.of(request, levels)

    @hookimpl
    def llmaas_prefill(self, step: DecodeStep) -> None:
        """Measure how long a prompt's tokens take."""
        if self._is_ours(step):
            self._estimates.prefilled(step.n_tokens, step.seconds)

    @hookimpl
    def llmaas_turn(self, n_left: int) -> int | None:
        """Let a call go first that would be late otherwise, and wait until it is over.

        Raises:
            Abandoned: The call ended while it waited.
        """
        call = self.running
        if call is None or not self._takes_turns:
            return None
        now_s = time.perf_counter()
        with self._lock:
            self._progressed(call, n_left, now_s)
        return self._give_way(call, now_s)

    def _give_way(self, call: Call, now_s: float) -> int:
        """Interrupt a call if another one would be late otherwise, and wait until that is over.

        Returns:
            Most prompt tokens to evaluate before the next turn.

        Raises:
            Abandoned: The call ended while it waited.
        """
        with self._lock:
            other = self._interrupting(call, now_s)
            if other is not None:
                self._interrupt(call, other, now_s)
        if other is not None:
            call.resumed.wait()
            if call.is_over:
                raise Abandoned
        return call.n_piece

    # -- inside, with the lock held --------------------------------------------------------------

    def _progressed(self, call: Call, n_left: int, now_s: float) -> None:
        if not call.n_piece:
            times = call.prompt_times
            n_most = times.most_tokens() or self._estimates.piece()
            call.n_piece = piece_of(n_left, n_most, times.n_batch)
        if n_left == 0:
            call.n_generated += 1
            if call.first_s is None:
                call.first_s, call.first_used_s = now_s, call.used(now_s)

    def _is_ours(self, step: DecodeStep) -> bool:
        """Return whether a batch is of a call, and not in a context where a plugin learns."""
        return self._ctx in {None, step.ctx}

    @property
    def _takes_turns(self) -> bool:
        """Whether other calls may come between the pieces of a prompt."""
        return self._has_promises and self._config.schedule != "fifo"

    @property
    def _interrupts(self) -> bool:
        """Whether a call may be interrupted for another one."""
        return self._config.preempt and self._config.schedule != "fifo"

    def _behind(self) -> list[Call]:
        """Return the calls for which another one leaves time."""
        return [*self.interrupted, *self.waiting]

    def _interrupting(self, call: Call, now_s: float) -> Call | None:
        """Return the call that goes before the rest of the running one; None if none does."""
        if not self._interrupts:
            return None
        if (over := next((one for one in self.interrupted if one.is_over), None)) is not None:
            return over  # at once: it only ends
        others = self._rivals(call)
        found = interrupting(
            self._job(call, now_s), [self._job(one, now_s) for one in others], now_s
        )
        return None if found is None else others[found]

    def _rivals(self, call: Call) -> list[Call]:
        """Return the calls that may go before a call."""
        return self._ready(besides=call)

    def _interrupt(self, call: Call, other: Call, now_s: float) -> None:
        call.used_s = call.used(now_s)
        call.resumed.clear()
        self.interrupted.append(call)
        self.n_interruptions += 1
        self._start(other, now_s)

    def _next(self) -> None:
        """Start the call that is due first, if none runs."""
        if self.running is not None:
            return
        now_s = time.perf_counter()
        over = [one for one in self.interrupted if one.is_over]
        if ready := over[:1] or self._ready():
            jobs = [self._job(one, now_s) for one in ready]
            self._start(ready[first_due(jobs)], now_s)

    def _start(self, call: Call, now_s: float) -> None:
        self.running, call.since_s = call, now_s
        if call in self.interrupted:
            self.interrupted.remove(call)
            call.resumed.set()
        else:
            self.waiting.remove(call)
            call.run()

    def _ready(self, besides: Call | None = None) -> list[Call]:
        """Return the calls that may run: not behind another call in the same context."""
        begun = self.interrupted if besides is None else [*self.interrupted, besides]
        busy = {one.context for one in begun if one.context}
        ready = list(self.interrupted)
        if len(self.interrupted) < _MOST_INTERRUPTED:
            for call in self.waiting:
                if call.context not in busy:
                    ready.append(call)
                if call.context:
                    busy.add(call.context)
        return ready

    def _job(self, call: Call, now_s: float) -> Job:
        """Return what remains of a call, and when it is due."""
        if self._config.schedule == "fifo":
            return Job(call.came_s, 0.0, call.came_s)
        used_s = call.used(now_s) if call is self.running else call.used_s
        last_s = call.came_s + self._config.longest_overtaken_s
        return self._estimates.job(call, used_s, now_s, last_s)

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

    def _leave_waiting(self, call: Call) -> None:
        """Remove a call that never runs."""
        self.waiting.remove(call)
        self._count_late(call)

    def _count_late(self, call: Call) -> None:
        """Count a call that the engine does not serve, if its first token is late by now."""
        waited_s = time.perf_counter() - call.came_s
        self.n_missed += self._estimates.is_late(call.app, call.promise.ttft, waited_s)

    def _end_waiting(self, call: Call, refusal: Refusal) -> None:
        self._leave_waiting(call)  # at once, because its task may notice the end only later
        call.end(refusal)


def check_wanted(call: Call) -> None:
    """Return if somebody still waits for a call.

    Raises:
        Abandoned: The call is over.
    """
    if call.is_over:
        raise Abandoned
