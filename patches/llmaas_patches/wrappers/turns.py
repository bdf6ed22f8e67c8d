"""Let other requests use an engine between the parts of one, and go on with it afterwards.

A prompt is evaluated in parts, and an answer token by token. Before each of them, plugins may let
other threads make requests on the engine (hook ``llmaas_turn``). The first of these requests saves
the cells of the one that it interrupts, which restores them when it goes on. Prompts are divided by
``Llama.eval``, before ``Llama.generate`` itself evaluates what is left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from llmaas_hooks import Levels, LlmaasError, Request, RequestScope, Tokens, request_scope
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.host import Host
from llmaas_patches.seats import Seat

__all__ = ["Interruptible", "Turns"]

Restore = Callable[[Host, LlamaEngine, Request], int]
"""Function that restores a request's cells, and returns how many of its tokens they hold."""


class Interruptible(Protocol):
    """Request whose end is registered with its engine, and which others may interrupt.

    Attributes:
        engine: Engine that serves the request.
        request: The request.
        is_waiting: Whether others may use the engine now. If one does, the request's cells are
            saved, and ``is_away`` is set.
        is_away: Whether another request has used the engine since.
        saves: Whether the cells are the request's, and are saved at its end.
        seat: Place of the request while others use the engine; None if it cannot lie aside.
    """

    engine: LlamaEngine
    request: Request
    is_waiting: bool
    is_away: bool
    saves: bool
    seat: Seat | None

    def come_back(self) -> None:
        """Register the request with its engine again.

        Raises:
            ReferenceError: The engine was closed meanwhile.
        """


class Turns:
    """Turns of one request on its engine.

    Attributes:
        away_s: Seconds for which other requests used the engine, restoring included.
    """

    def __init__(
        self, host: Host, end: Interruptible, scope: RequestScope, restore: Restore
    ) -> None:
        """Take turns for a request that was made in the blocks of ``scope``."""
        self._host, self._end, self._restore = host, end, restore
        self._scope = scope
        self.away_s = 0.0

    def count_wait(self) -> float:
        """Count the seconds for which the app waited between two turns, as others'; return them."""
        seat = self._end.seat
        if seat is None:
            return 0.0
        waited_s, seat.waited_s = seat.waited_s, 0.0
        self.away_s += waited_s
        return waited_s

    def evaluate_prompt(self, levels: Levels | None, n_done: int, first_output: int | None) -> None:
        """Evaluate a prompt in parts, but for the last one, which ``Llama.generate`` evaluates.

        Args:
            levels: Result of the hook ``llmaas_level``.
            n_done: Number of leading tokens whose cells are there.
            first_output: First token that gives logits; None if only the last one does. These
                tokens are never divided.
        """
        tokens, llama = self._end.request.tokens, self._end.engine.llama
        last = len(tokens) - 1 if first_output is None else first_output
        while True:
            n_most = self.take(levels, max(len(tokens) - n_done, 1), 0, n_done)
            if n_most is None or n_done + n_most > last:
                return
            self._evaluate(tokens[: n_done + n_most], n_done)
            n_done = int(llama.n_tokens)

    def take_in_answer(
        self,
        levels: Levels | None,
        n_generated: int,
        token: int,
        reply: Sequence[int] | None,
    ) -> None:
        """Let other requests use the engine before a token is evaluated, maybe with theirs.

        Args:
            levels: Result of the hook ``llmaas_level``.
            n_generated: Number of tokens that were sampled.
            token: The last of them, which is evaluated next.
            reply: Tokens that the app has added.
        """
        seat = self._end.seat
        if seat is not None:
            seat.next_token = None if reply else token
        self.take(levels, 0, n_generated)

    def take(
        self, levels: Levels | None, n_left: int, n_generated: int, n_held: int | None = None
    ) -> int | None:
        """Let other requests use the engine, and restore this one's cells if any did.

        Args:
            levels: Result of the hook ``llmaas_level``.
            n_left: Number of prompt tokens that remain to be evaluated.
            n_generated: Number of tokens that were sampled.
            n_held: Number of leading tokens of the cells that the request goes on with; None means
                all.

        Returns:
            Most prompt tokens to evaluate before the next turn, or None for all.
        """
        engine, end, seat = self._end.engine, self._end, self._end.seat
        if seat is not None and (not seat.can_leave or (n_left == 0 and seat.next_token is None)):
            seat = None
        held = engine.resident_tokens()[:n_held]
        if len(held) > engine.n_explained or engine.is_sparse:
            return None  # plugins cannot save these cells
        if seat is not None:
            seat.step_s = None
        state, began = engine.leave(), time.perf_counter()
        end.is_waiting = True
        try:
            n_most = self._host.hooks.turn(end.request, n_left, seat)
        finally:
            end.is_waiting = False
        if seat is not None and seat.step_s is not None:
            self.away_s += time.perf_counter() - began - seat.step_s
        if seat is not None and seat.is_aside:
            raise LlmaasError("a plugin put a request aside and did not bring it back")
        is_changed = not engine.is_alive or engine.n_explained < len(held)  # without a request
        if end.is_away or is_changed:
            end.come_back()
            engine.enter(state)
            self._bring_back(held, levels, n_generated)
            end.saves = True
            self.away_s += time.perf_counter() - began
        return n_most

    # -- inside ---------------------------------------------------------------------------------

    def _bring_back(self, held: Tokens, levels: Levels | None, n_generated: int) -> None:
        """Fill the cells with exactly these tokens.

        Tokens that no plugin restored are evaluated: the prompt's as a prompt, the answer's one by
        one, each at its level.
        """
        host, engine, request = self._host, self._end.engine, self._end.request
        host.hooks.request_resume(request, levels, n_generated)
        engine.shorten(engine.n_explained)  # the rest may be cells that an app changed
        with request_scope.entered(self._scope):
            restored = dataclasses.replace(request, tokens=held)
            n = self._restore(host, engine, restored) if len(held) else 0
        engine.resident_app = request.app
        engine.shorten(n)
        prompt = held[: len(request.tokens)]
        if n < len(prompt):
            host.hooks.request_resume(request, levels, 0)
            self._evaluate(prompt, n)
            host.hooks.request_resume(request, levels, n_generated)
        for i in range(max(n, len(prompt)), len(held)):
            self._evaluate(held[: i + 1], i)

    def _evaluate(self, tokens: Tokens, n_done: int) -> None:
        """Evaluate these tokens but for the first ``n_done``, which the cells hold."""
        engine = self._end.engine
        with request_scope.entered(self._scope), engine.recording_drops():
            if n_done:
                engine.shorten(n_done)
            else:
                engine.llama.reset()
            engine.llama.eval(tokens[n_done:].tolist())
