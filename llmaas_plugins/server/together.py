"""Admission of several calls that are decoded together.

A call that is in its answer leaves its next token with the group, and lets others use the engine.
The last one evaluates the tokens of all in one batch, or in one batch for each level of ``elastic``
that is in use. Each call then takes its turn to sample. A call also lets others in between the
pieces of its prompt, and while its client is sent a piece of text. So a call waits for another
one's piece of a prompt at most, and never for a client.

``Admission.running`` is the call that uses the engine. The others of the group lie aside, each in
its seat.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_hooks import ContextCreate, DecodeStep, Levels, Request, Seat, hookimpl
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned, Admission
from llmaas_plugins.server.calls import Call, Stage, Stream
from llmaas_plugins.server.prompt_pieces import MOST_PIECE
from llmaas_plugins.server.refusal import stopping
from llmaas_plugins.server.rounds import Member, Pieces, Rounds, may_share, next_member
from llmaas_plugins.server.schedule import first_due

__all__ = ["Together"]

_PATIENCE_S = 0.02
"""Seconds that a batch waits for a call whose text is on its way to the client."""

_NO_CELLS = "kv_chunks does not keep the cells of this engine"

_log = logging.getLogger("llmaas.server")


class Together(Admission):
    """Calls that run together, wait, or were interrupted."""

    def __init__(self, config: ServiceConfig, why_alone: str | None = None) -> None:
        """Let ``config.most_together`` calls run together, unless there is a reason against it."""
        super().__init__(config)
        self.aside: list[Call] = []
        self.n_batches = self.n_batch_tokens = self.n_alone = 0
        self._pieces, self._rounds = Pieces(), Rounds()
        self._stepped: set[int] = set()  # levels that had a batch since the last piece of a prompt
        self._is_stepping = False
        self._options_against = why_alone
        self._create: ContextCreate | None = None  # of the server's context

    @property
    def n_running(self) -> int:
        """Number of calls that run."""
        return super().n_running + len(self.aside)

    def end_running(self) -> None:
        """End the calls that have begun."""
        with self._lock:
            for call in self.aside:
                call.end(stopping())
        super().end_running()

    def leave(self, call: Call, notes: Mapping[str, Any] | None = None) -> None:
        """Remove a call that is done or no longer wants to wait; learn from notes about it."""
        with self._lock:
            is_known = call in self.aside or call.is_done
            if call in self.aside:
                self.aside.remove(call)
            if is_known:
                call.since_s = time.perf_counter()  # it does not use the engine any more
                self._estimates.learn(call, notes or {})
            super().leave(call, notes)

    def has_begun(self, call: Call) -> bool:
        """Return whether a call uses the engine, or goes on when it is its turn."""
        return super().has_begun(call) or call in self.aside

    def close(self, call: Call) -> None:
        """Close the completion of a call that has begun; waits for the engine."""
        self._come_back(call)
        super().close(call)

    def shared(self, call: Call | None, stream: Stream, *, is_last: bool) -> Stream:
        """Let others use the engine while a stream's pieces are sent."""
        return stream if call is None else self._shared(call, stream, is_last=is_last)

    @hookimpl(tryfirst=True)
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Ask for places of the calls aside in the server's context, the first one."""
        super().llmaas_context_create(create)
        if self._create is None:
            self._create = create
            if self._options_against is None:
                create.wants_seats = self._config.most_together
            create.checks.append(self._tell)

    @hookimpl(specname="llmaas_decode")
    def end_if_unwanted(self, step: DecodeStep) -> None:
        """Stop the running call after a batch of its own if it is over.

        Raises:
            Abandoned: The running call is over.
        """
        if self._is_stepping or not self._is_ours(step):
            return
        call = self.running
        if call is not None and call.seat is not None and call.n_generated and step.n_tokens == 1:
            self._rounds.stepped(call.seat.level, 1, step.seconds)
        super().end_if_unwanted(step)

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Learn the context and the batches of the calls, and the level of a call's prompt."""
        super().llmaas_request_begin(request, levels)
        self._pieces.fit(int(request.engine.llama.n_batch))

    @hookimpl
    def llmaas_turn(self, n_left: int, seat: Seat | None) -> int | None:  # type: ignore[override]
        """Let others use the engine, and evaluate a call's token together with theirs.

        Raises:
            Abandoned: The call ended while it waited.
        """
        call, now_s = self.running, time.perf_counter()
        if call is not None:
            self._end_stage(call, now_s)
        if call is None or seat is None:
            return super().llmaas_turn(n_left)
        with self._lock:
            is_first = call.n_piece == 0
            self._begin_turn(call, n_left, seat, now_s)
            if call.is_shared and not self._is_wanted():
                return MOST_PIECE
            if call.is_shared and is_first and n_left:  # it has just got the engine for it
                return self._pieces.n_tokens
            if call.is_shared or self._are_ready():
                self._put_aside(call, call.stage_aside(n_left), now_s)
                self._next()
        if call.stage is not None:
            self._wait(call)
            if call.is_over:
                raise Abandoned
        if call.is_shared:
            return self._pieces.n_tokens
        return self._give_way(call, time.perf_counter())

    def report(self) -> dict[str, Any]:
        """Return the counters of the status, as plain JSON types."""
        counts = {"batches": self.n_batches, "tokens": self.n_batch_tokens, "alone": self.n_alone}
        return {**super().report(), "together": {**counts, "why_alone": self._why_alone}}

    @property
    def _why_alone(self) -> str | None:
        """Reason for which calls run alone; None if they run together."""
        create = self._create
        if create is not None and create.n_seats:  # 0 also if another plugin refused the context
            return None
        return self._options_against or (create and create.why_no_seats) or _NO_CELLS

    def _tell(self, _: int) -> bool:
        """Say why calls run alone, if they do; accept the context."""
        if self._why_alone:
            _log.warning(
                "service.most_together = %d has no effect, calls run one at a time: %s",
                self._config.most_together,
                self._why_alone,
            )
        return True

    @hookimpl
    def llmaas_prefill(self, step: DecodeStep) -> None:
        """Measure how long a prompt's tokens take."""
        super().llmaas_prefill(step)
        if self._is_ours(step):
            self._pieces.evaluated(step.n_tokens, step.seconds)

    # -- streams --------------------------------------------------------------------------------

    def _shared(self, call: Call, stream: Stream, *, is_last: bool) -> Stream:
        try:
            while True:
                self._come_back(call)
                try:
                    piece = next(stream)
                except StopIteration as end:
                    if is_last:
                        self._done(call)
                    return end.value
                self._go_away(call)
                yield piece
        finally:
            self._come_back(call)
            stream.close()

    def _go_away(self, call: Call) -> None:
        """Let others use the engine from now on, if they want to."""
        with self._lock:
            if call is self.running:
                call.away_since_s = time.perf_counter()
                self._next()

    def _come_back(self, call: Call) -> None:
        """Wait for the engine."""
        with self._lock:
            call.away_since_s = None
            if call not in self.aside:
                return
            call.stage = Stage.BACK
            call.resumed.clear()
            self._next()
        self._wait(call)

    def _done(self, call: Call) -> None:
        """Let others use the engine while the last pieces are sent."""
        with self._lock:
            if call is self.running:
                call.used_s, call.is_done, self.running = call.used(time.perf_counter()), True, None
                self._next()

    # -- inside ---------------------------------------------------------------------------------

    def _wait(self, call: Call) -> None:
        """Wait until a call aside uses the engine; evaluate the tokens of all if it is to."""
        began_s = time.perf_counter()
        while not call.resumed.wait(_PATIENCE_S):
            with self._lock:
                self._next()
        seat = call.seat
        assert seat is not None
        if call.stage is Stage.TOKEN and not call.is_over:
            self._step(seat)
        is_between = call.stage is Stage.BACK  # two turns, which measure other waits themselves
        seat.enter(time.perf_counter() - began_s if is_between else 0.0)

    def _step(self, seat: Seat) -> None:
        with self._lock:
            others = [one for one in self.aside if one.is_due_at(seat.level)]
            self._is_stepping = True
        try:
            step_s = seat.evaluate_with([one.seat for one in others if one.seat is not None])
        finally:
            self._is_stepping = False
        with self._lock:
            self._stepped.add(seat.level)
            for one in others:
                one.stage = Stage.READY
                one.used_s += step_s or 0.0
            if step_s is not None:
                self._pieces.stepped(step_s)
                self._rounds.stepped(seat.level, 1 + len(others), step_s)
                self.n_batches += 1
                self.n_batch_tokens += 1 + len(others)

    def _end_stage(self, call: Call, now_s: float) -> None:
        """Forget why a call lay aside, in its first turn since then."""
        if call.stage is Stage.READY:
            self._rounds.sampled(now_s - call.since_s)
        call.stage = None

    # with the lock held

    def _begin_turn(self, call: Call, n_left: int, seat: Seat, now_s: float) -> None:
        call.seat = seat
        self._progressed(call, n_left, now_s)
        call.is_shared = not call.promise or (
            n_left == 0 and self._may_share(call, seat.level, now_s)
        )
        self.n_alone += bool(self.aside) and not (n_left or call.is_shared)

    def _are_ready(self) -> bool:
        """Return whether calls aside have yet to sample from the last batch."""
        return any(call.stage is Stage.READY for call in self.aside)

    def _may_share(self, call: Call, level: int, now_s: float) -> bool:
        """Return whether a call in its answer keeps its promise if it is decoded with others.

        While another call waits for a promised first token, it shares nothing, and ends sooner.
        """
        ready = self._ready(besides=call)
        if self._is_any_urgent(ready):
            return False
        limit_s = self._estimates.limit_s(call.app, "tpot", call.promise.tpot)
        answering = [one for one in self.aside if one.stage is not Stage.PIECE]
        sizes = Counter(one.seat.level for one in answering if one.seat is not None)
        round_s = self._rounds.seconds(sizes + Counter([level]))
        if len(answering) < len(self.aside) or not all(one.promise for one in ready):
            round_s += self._pieces.most_s
        assert call.first_s is not None
        return may_share(limit_s, round_s, now_s - call.first_s, call.n_generated - 1)

    def _is_any_urgent(self, calls: Sequence[Call]) -> bool:
        """Return whether one waits for its first token in time, for which others make way."""
        are_urgent = (call.promise.ttft is not None and call.first_s is None for call in calls)
        return self._interrupts and any(are_urgent)

    def _put_aside(self, call: Call, stage: Stage, now_s: float) -> None:
        assert call.seat is not None
        call.seat.leave()
        call.used_s = call.used(now_s)
        call.stage = stage
        call.resumed.clear()
        self.aside.append(call)
        self.running = None

    def _next(self) -> None:
        """Start the call that uses the engine next, if none does."""
        now_s = time.perf_counter()
        self._put_away(now_s)
        if self.running is not None:
            return
        members = [self._member(call, now_s) for call in self.aside]
        found = next_member(members, self._stepped)
        if found is None and not self._are_due(members):
            self._stepped.clear()
            self._begin_or_go_on(now_s)
            if self.running is None:
                found = next_member(members, self._stepped)
        if found is not None:
            self._start(self.aside[found], now_s)

    def _put_away(self, now_s: float) -> None:
        """Put the running call aside if its text is on its way, and others want the engine."""
        call = self.running
        if call is None or call.away_since_s is None or call.seat is None:
            return
        if call.is_shared and call.seat.can_leave and self._is_wanted():
            self._put_aside(call, Stage.AWAY, now_s)

    def _are_due(self, members: Sequence[Member]) -> bool:
        """Return whether a batch is due, and only waits for a client."""
        return any(m.stage is Stage.TOKEN and m.level not in self._stepped for m in members)

    def _begin_or_go_on(self, now_s: float) -> None:
        """Start the next piece of a prompt, or a new call, whichever is due first.

        A new one with a promise waits for those in their answers, unless it would be late.
        """
        ready, first = self._ready(), self._first_in_answer(now_s)
        if first is not None and self._is_any_urgent(ready):
            self._start(self._interrupting(first, now_s) or first, now_s)
            return
        over = [call for call in self.interrupted if call.is_over]
        pieces = [call for call in self.aside if call.stage is Stage.PIECE]
        if found := over[:1] or [*pieces, *ready]:
            self._start(found[first_due([self._job(call, now_s) for call in found])], now_s)

    def _interrupting(self, call: Call, now_s: float) -> Call | None:
        """Return the call that goes before a call; none does before all that are READY."""
        return None if self._are_ready() else super()._interrupting(call, now_s)

    def _first_in_answer(self, now_s: float) -> Call | None:
        """Return the call aside that is due first of those that were promised their next token."""
        found = [call for call in self.aside if call.promise and call.stage is Stage.TOKEN]
        return found[first_due([self._job(call, now_s) for call in found])] if found else None

    def _start(self, call: Call, now_s: float) -> None:
        if call not in self.aside:
            super()._start(call, now_s)
            return
        self.aside.remove(call)
        self.running, call.since_s = call, now_s
        call.away_since_s = None
        call.resumed.set()

    def _ready(self, besides: Call | None = None) -> list[Call]:
        """Return the calls that may run: not behind another call in the same context.

        If as many as may run together lie aside, only calls with promises go before them.
        """
        busy = {call.context for call in self.aside if call.context}
        ready = [call for call in super()._ready(besides) if call.context not in busy]
        if len(self.aside) < self._config.most_together:
            return ready
        return [call for call in ready if call.promise or call in self.interrupted]

    def _behind(self) -> list[Call]:
        """Return the calls for which another one leaves time, those aside too."""
        return [*super()._behind(), *self.aside]

    def _rivals(self, call: Call) -> list[Call]:
        """Return the calls that may go before a call, those aside too."""
        aside = [one for one in self.aside if one is not call and one.stage is not Stage.AWAY]
        return [*super()._rivals(call), *aside]

    def _is_wanted(self) -> bool:
        """Return whether another call wants the engine."""
        return bool(self.aside or self._ready(besides=self.running))

    def _member(self, call: Call, now_s: float) -> Member:
        assert call.stage is not None
        since_s = call.away_since_s
        is_expected = since_s is not None and now_s - since_s < _PATIENCE_S
        level = 0 if call.seat is None else call.seat.level
        return Member(call.stage, call.is_over, is_expected, level)
