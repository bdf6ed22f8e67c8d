"""Life of one request: how it was made, its times, and the work at its end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

from llmaas_hooks import Levels, Request, RequestScope, RequestStats
from llmaas_patches.drafting import Drafting
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host
from llmaas_patches.seats import Seat
from llmaas_patches.wrappers.turns import Turns

__all__ = ["Clock", "End", "Run"]


class Run:
    """Run of a generator that an app got from ``Llama.generate``.

    Attributes:
        given: Arguments of the call.
        scope: Blocks in which the call was made.
        resets: Whether the request drops the cells that its prompt does not begin with.
        clock: Timing of the request.
        generator: Reference to the generator, which owns this object.
        is_yielding: Whether the generator waits for the app, or is about to.
    """

    generator: weakref.ref[Any]

    def __init__(self, given: Mapping[str, Any], scope: RequestScope) -> None:
        """Keep what a call was given, and the blocks around it."""
        self.given, self.scope = given, scope
        self.resets = bool(given.get("reset", True))
        self.clock = Clock()
        self.is_yielding = False

    @property
    def is_paused(self) -> bool:
        """Whether the generator waits for the app or has ended, by Ctrl-C anywhere too."""
        generator = self.generator()
        return self.is_yielding or generator is None or not generator.gi_running


class Clock:
    """Timing of one request."""

    def __init__(self) -> None:
        """Start now."""
        self._started = time.perf_counter()
        self._prepare_s = 0.0
        self._first_token_s: float | None = None
        self.n_generated = 0
        self._resumed: float | None = None  # while the app waits for a token after the first
        self._decode_s = 0.0
        self._first_away_s = self._decode_away_s = 0.0

    def prepared(self) -> None:
        """Record that the cells are restored, and that evaluation can start."""
        self._prepare_s = time.perf_counter() - self._started

    def resumed(self, turns: Turns | None) -> None:
        """Begin a token after the first: the app has asked for it."""
        waited_s = 0.0 if turns is None else turns.count_wait()
        self._resumed = time.perf_counter() - waited_s

    def token(self, turns: Turns | None) -> None:
        """Record that a token was sampled."""
        self.n_generated += 1
        away_s = 0.0 if turns is None else turns.away_s
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._started
            self._first_away_s = away_s
        else:
            self._decode_s += self._pending_s()
            self._decode_away_s = away_s - self._first_away_s
        self._resumed = None

    def stats(self, n_prompt: int, n_reused: int) -> RequestStats:
        """Return the counts and times so far."""
        return RequestStats(
            n_prompt=n_prompt,
            n_reused=n_reused,
            n_generated=self.n_generated,
            prepare_s=self._prepare_s,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._started,
            decode_s=self._decode_s,
            first_away_s=self._first_away_s,
            decode_away_s=self._decode_away_s,
            pending_s=self._pending_s(),
        )

    def _pending_s(self) -> float:
        """Return the seconds for which the app has waited for a token after the first."""
        return 0.0 if self._resumed is None else time.perf_counter() - self._resumed


class End:
    """Work to do at the end of a request. If Ctrl-C cuts it off, the next call goes on with it.

    Attributes:
        n_reused: Number of leading prompt tokens that were in the cells.
        n_held: Tokens in ``Llama``'s records when the last token was given to the app.
        levels: Result of the hook ``llmaas_level``.
        seat: Place of the request while others use the engine; None if it cannot lie aside.
        drafting: Plugins' drafts for the request, or None.
        is_sound: Whether the tokens of all cells that the request continues from are known.
        is_begun: Whether plugins may know the request.
        saves: Whether the request's cells must still be saved.
        is_waiting: Whether other requests may use the engine before this one goes on.
        is_away: Whether another request has used the engine since.
    """

    def __init__(self, host: Host, engine: LlamaEngine, request: Request, run: Run) -> None:
        """Wait for the end of a request."""
        self.engine, self.request, self.run = engine, request, run
        self._host = host
        self._is_disowned = False
        self.n_reused = self.n_held = 0
        self.seat: Seat | None = None
        self.levels: Levels | None = None
        self.drafting: Drafting | None = None
        self.is_sound = self.is_begun = self.saves = False
        self.is_waiting = self.is_away = False

    @property
    def is_paused(self) -> bool:
        """Whether others may use the cells: the request waits for its turn or for the app."""
        return self.is_waiting or self.run.is_paused

    @property
    def is_lost(self) -> bool:
        """Whether the generator is gone, as where the collector freed it."""
        return self.run.generator() is None

    def disown(self, context_id: str) -> None:
        """Save nothing if the request runs in this persistent context."""
        if self.request.context_id == context_id:
            self._is_disowned = True

    def finish(self) -> None:
        """Do the work now, exactly once."""
        self.engine.end(self)

    def come_back(self) -> None:
        """Register the request with its engine again, after others have used it."""
        self._host.collecting.require_none()
        engine = self.engine
        if not engine.is_alive:
            raise ReferenceError("the Llama object was closed while another request used it")
        self.saves = False  # until the cells are this request's again
        self._host.leave_seats(engine.ctx)
        if self.is_away:
            engine.end()
        engine.settle()
        engine.drop_half_restored()
        if self.is_away:
            self.is_away = False
            engine.begin(self)
            if self.drafting is not None:
                self.drafting.attach()

    def give_up(self) -> None:
        """End the request if it is away or aside: its cells are saved already, or given up."""
        if self.is_away or (self.seat is not None and self.seat.is_aside):
            self.is_away = self.saves = False
            self()

    def __call__(self) -> None:
        """Do the work; a request that waits for its turn only saves its cells."""
        if self.is_waiting and self.engine.is_alive:
            self.is_away = True  # first, as the cells are another request's from now on
            if self.saves and not (self.seat is not None and self.seat.is_elsewhere):
                self._save(is_over=False)
            self._detach()
            return
        request, stats = self.request, self.run.clock.stats
        try:
            if self.seat is not None:
                self.seat.close()
            saves, self.saves = self.saves, False
            if saves:
                self._save(is_over=True)
        finally:
            try:
                if self.is_begun:
                    self._host.hooks.request_end(request, stats(len(request.tokens), self.n_reused))
                    self.is_begun = False
            finally:
                self._detach()  # last: a plugin may have attached the drafts again

    def _detach(self) -> None:
        if self.drafting is not None:
            self.drafting.detach()

    def _save(self, *, is_over: bool) -> None:
        engine = self.engine
        if not _can_save(engine):
            return
        if self.n_held:
            engine.drop_unsaid(self.n_held)
        is_own = engine.resident_app == self.request.app  # another app may have reset it since
        if is_own and not self._is_disowned:
            tokens = engine.reusable_tokens()
            self._host.hooks.kv_save(self.request, tokens, is_over=is_over)


def _can_save(engine: LlamaEngine) -> bool:
    """Return whether the context still exists and its tokens are known.

    The app may have closed ``Llama`` before its generator, dropped both, or used the engine itself.
    """
    if not engine.is_alive:
        return False
    llama = engine.llama
    return llama.ctx is not None and llama.n_tokens <= engine.n_explained
