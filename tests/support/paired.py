"""Two requests on one thread, which are decoded together."""

from __future__ import annotations

import numpy as np
import pytest
from switching import OTHER, PROMPT

from llmaas_hooks import hookimpl
from llmaas_hooks.request_scope import serving_context

N_SEATS = 2
PROMPTS = {"a": PROMPT, "b": OTHER}


class Pair:
    """Request a, in whose turns request b takes its own.

    Attributes:
        prompts: Prompt of each request.
        rows: Logits from which each request's tokens were sampled.
        sampled: Tokens of each request.
        n_batches: Batches of both requests' tokens.
        n_alone: Batches of request b's token alone, because the levels differ.
        told: Arguments of ``llmaas_together`` by request.
        switched: Requests of ``llmaas_request_switch``, by app.
        before_b: Function that is called while both are aside.
    """

    def __init__(self, prompts=PROMPTS):
        self.prompts = prompts
        self.llama, self.b, self.seats = None, None, {}
        self.rows, self.sampled, self.told, self.switched = {}, {}, {}, []
        self.n_batches, self.n_alone, self.n_saved = 0, 0, 0
        self.is_together = True
        self.before_b = lambda: None

    @hookimpl
    def llmaas_context_create(self, create):
        create.n_seats = N_SEATS
        create.params.n_seq_max = 1 + N_SEATS
        create.params.n_ctx = (1 + N_SEATS) * create.params.n_ctx
        create.params.kv_unified = True

    @hookimpl
    def llmaas_kv_restore(self, request):
        request.engine.keeps_cells = True

    @hookimpl
    def llmaas_kv_save(self, tokens):
        self.n_saved += 1

    @hookimpl
    def llmaas_together(self, request, n_tokens, begins):
        self.told.setdefault(request.app, []).append((begins, n_tokens))

    @hookimpl
    def llmaas_request_switch(self, request):
        self.switched.append(request.app)

    @hookimpl
    def llmaas_turn(self, request, n_left, seat):
        self.seats[request.app] = seat
        if n_left or self.b is None:
            return
        a, b = self.seats["a"], self.seats.get("b")
        if request.app == "b":
            b.leave()
            if self.is_together and a.level == b.level:
                assert a.evaluate_with([b]) > 0
                self.n_batches += 1
            elif self.is_together:
                with pytest.raises(ValueError, match="a batch has one level"):
                    a.evaluate_with([b])
                assert b.evaluate_with([]) > 0
                self.n_alone += 1
            b.enter()
            return
        a.leave()
        self.before_b()
        self.step_b()
        a.enter()

    def step_b(self):
        """Let request b sample a token, and put it aside."""
        seat = self.seats.get("b")
        if seat is not None:
            seat.enter()
        with serving_context(None, "b"):
            self.sampled.setdefault("b", []).append(next(self.b))
        self.seats["b"].leave()

    @hookimpl
    def llmaas_logits(self, view):
        app = "b" if self.b is not None and self.b.gi_running else "a"
        self.rows.setdefault(app, []).append(view.logits.copy())

    def alone(self, app, n):
        """Return the tokens of a request alone, and their logits."""
        self.rows, self.b = {}, None
        with serving_context(None, app):
            generator = self.llama.generate(self.prompts[app], temp=0.0)
            found = [next(generator) for _ in range(n)]
            generator.close()
        return found, np.array(self.rows["a"])

    def both(self, n):
        """Let request a sample ``n`` tokens, and request b as many but one; return the open a."""
        self.rows, self.sampled, self.seats, self.told, self.switched = {}, {}, {}, {}, []
        with serving_context(None, "b"):
            self.b = self.llama.generate(self.prompts["b"], temp=0.0)
        with serving_context(None, "a"):
            a = self.llama.generate(self.prompts["a"], temp=0.0)
            self.sampled["a"] = [next(a) for _ in range(n)]
        return a

    def end(self, a):
        """End both requests."""
        a.close()
        self.seats["b"].enter()
        self.b.close()

    def check(self, n):
        """Check the tokens and logits of both requests against those of each alone."""
        alone = {}
        for app in self.prompts:
            self.llama.reset()
            alone[app] = self.alone(app, n)
        self.llama.reset()
        a = self.both(n)
        for app, (tokens, rows) in alone.items():
            found = self.sampled[app]
            assert found == tokens[: len(found)]
            np.testing.assert_array_equal(self.rows[app], rows[: len(found)])
        self.end(a)
        return alone
