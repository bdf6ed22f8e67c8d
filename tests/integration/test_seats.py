"""Requests that lie aside while others use their engine, and are decoded together."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from llama_cpp import llama_cpp
from paired import N_SEATS, PROMPTS, Pair

from llmaas_hooks import Proposal, hookimpl
from llmaas_hooks.request_scope import serving_context

N = 8


@pytest.fixture
def pair(patched):
    pair = Pair()
    patched(pair=pair)
    return pair


@pytest.fixture
def exact(pair, make):
    """Return the pair on an engine that evaluates even batches token by token."""
    pair.llama = make(n_ubatch=1)
    return pair


def check(pair, n=N, atol=0.0):
    """Check the tokens and logits of both requests against those of each alone."""
    alone = {app: pair.alone(app, n) for app in PROMPTS}
    a = pair.both(n)
    for app, (tokens, rows) in alone.items():
        found = pair.sampled[app]
        assert found == tokens[: len(found)]
        np.testing.assert_allclose(pair.rows[app], rows[: len(found)], rtol=0, atol=atol)
    return a


def sequences(llama):
    """Return the last position of each sequence."""
    memory = llama_cpp._lib.llama_get_memory(llama.ctx)
    return [
        llama_cpp._lib.llama_memory_seq_pos_max(memory, sequence) for sequence in range(1 + N_SEATS)
    ]


def own_batches(llama, sampled):
    """Return the logits of llama.cpp's own two sequences, evaluated in the order of the pair's."""
    lib, (n_a, n_b) = llama_cpp._lib, map(len, PROMPTS.values())
    params = type(llama.context_params).from_buffer_copy(llama.context_params)
    params.n_ctx, params.n_seq_max, params.kv_unified = 768, 2, True
    ctx, batch = lib.llama_init_from_model(llama.model, params), lib.llama_batch_init(512, 0, 1)
    rows = {"a": [], "b": []}

    def put(*items):
        batch.n_tokens = len(items)
        for i, (token, position, app, gives_row) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, gives_row
            batch.seq_id[i][0], batch.n_seq_id[i] = "ab".index(app), 1
        assert lib.llama_decode(ctx, batch) == 0
        for i, (_, _, app, gives_row) in enumerate(items):
            if gives_row:
                row = lib.llama_get_logits_ith(ctx, i)
                rows[app].append(np.ctypeslib.as_array(row, shape=(llama.n_vocab(),)).copy())

    for app, prompt in PROMPTS.items():
        put(*((token, i, app, i == len(prompt) - 1) for i, token in enumerate(prompt)))
    put((sampled["a"][0], n_a, "a", True))
    for i, (a, b) in enumerate(zip(sampled["a"][1:-1], sampled["b"][:-1], strict=True)):
        put((a, n_a + 1 + i, "a", True), (b, n_b + i, "b", True))
    lib.llama_batch_free(batch)
    lib.llama_free(ctx)
    return rows


def test_hook_llmaas_together(exact):
    a = check(exact)
    n_a, n_b = len(PROMPTS["a"]), len(PROMPTS["b"])
    first = [(True, n_a), (False, n_a), (True, n_a + 1)]  # b's prompt, before any batch of both
    assert exact.told == {"a": first, "b": [(True, n_b)]}
    a.close()
    exact.seats["b"].enter()
    exact.b.close()
    assert exact.told["a"] == [*first, (False, n_a + N - 1)]
    assert exact.told["b"] == [(True, n_b), (False, n_b + N - 2)]


def test_hook_llmaas_request_switch(exact):
    """It names whose token is evaluated or sampled next."""
    a = check(exact)
    a_again, both = ["a"], ["b", "a", "b", "a"]  # b returns, a's batch, b samples, a samples
    assert exact.switched == a_again + (N - 2) * both
    a.close()


def test_plugins_that_know_one_request_at_a_time(patched, make):
    class Logits:
        @hookimpl
        def llmaas_logits(self, view):
            pass

    class Switching(Logits):
        @hookimpl
        def llmaas_request_switch(self, request):
            pass

    class Reason:
        @hookimpl
        def llmaas_context_create(self, create):
            self.found = create.why_no_seats

    reason = Reason()
    patched(logits=Logits(), switching=Switching(), reason=reason)
    make()
    assert reason.found == "logits can serve one call at a time only"


def test_drafts_are_made_while_a_request_has_the_engine_to_itself(patched, make):
    class Ending(Pair):
        def step_b(self):
            if len(self.sampled.get("b", [])) < N:
                super().step_b()
                return
            self.seats["b"].enter()
            self.b.close()
            self.b = None

    pair, text = Ending(), []

    class Drafter:
        most, n_made = 3, 0

        def propose(self, tokens, seconds):
            return Proposal(2.0, lambda: self.make(len(tokens)))

        def make(self, n):
            assert pair.b is None
            self.n_made += 1
            return text[n : n + self.most]

    class Offering:
        @hookimpl
        def llmaas_draft(self, request):
            return drafter if request.app == "a" and text else None

    drafter = Drafter()
    patched(pair=pair, offering=Offering())
    pair.llama = make(n_ubatch=1)
    text += [*PROMPTS["a"], *pair.alone("a", 3 * N)[0]]
    pair.alone("a", 3 * N)
    n_alone = drafter.n_made
    a = check(pair, 3 * N)
    assert drafter.n_made > 2 * n_alone > 0
    assert pair.n_batches == N - 1
    a.close()


def test_the_next_request_samples_from_its_own_logits(exact):
    """The engine's last logits are of another request's token."""
    a = exact.both(3)
    a.close()
    *said, last = exact.sampled["a"]
    assert last != exact.sampled["b"][-1]
    with serving_context(None, "a"):
        again = exact.llama.generate([*PROMPTS["a"], *said], temp=0.0)
        assert next(again) == last
    again.close()
    exact.seats["b"].enter()
    exact.b.close()


def test_the_next_request_after_one_that_ended_aside(exact):
    """The cells in sequence 0 are of that one, but the engine's last logits are not."""
    a, b = exact.both(3), exact.seats["b"]
    exact.seats["a"].leave()
    assert b.evaluate_with([]) > 0
    a.close()
    *said, last = exact.sampled["a"]
    with serving_context(None, "a"):
        again = exact.llama.generate([*PROMPTS["a"], *said], temp=0.0)
        assert next(again) == last
    again.close()
    b.enter()
    exact.b.close()


def test_tokens_of_two_requests_in_one_batch(pair, make):
    pair.llama = make()
    a = pair.both(N)
    expected = own_batches(pair.llama, pair.sampled)
    for app, rows in expected.items():
        np.testing.assert_array_equal(pair.rows[app], rows)
    a.close()
    assert pair.n_batches == N - 2  # the other request's first turn begins it


def test_another_batch_replaces_the_results_of_one(patched, make):
    """Request b evaluates a token alone before request a samples from a batch of both."""

    class Hurrying(Pair):
        def step_b(self):
            super().step_b()
            self.is_together = False
            super().step_b()
            self.is_together = True

    pair = Hurrying()
    patched(pair=pair)
    pair.llama = make(n_ubatch=1)
    alone = {app: pair.alone(app, 2 * N) for app in PROMPTS}
    pair.both(N).close()
    assert pair.n_batches == N - 2
    for app, (tokens, rows) in alone.items():
        n = len(pair.sampled[app])
        assert pair.sampled[app] == tokens[:n]
        np.testing.assert_array_equal(pair.rows[app], rows[:n])


@pytest.mark.parametrize("app", PROMPTS)
def test_one_request_interrupts_another_that_has_no_time_to_leave(patched, make, app):
    """Each has its own cells and records then, whichever of them has sequence 0."""

    class Interrupting(Pair):
        n_turns = 0

        @hookimpl
        def llmaas_turn(self, request, n_left, seat):
            other = self.seats.get("b" if app == "a" else "a")
            if request.app == app and other is not None and other.is_aside and not n_left:
                self.n_turns += 1
                if self.n_turns % 3 == 0:
                    other.enter()
                    other.leave()
                    return
            super().llmaas_turn(request, n_left, seat)

    pair = Interrupting()
    patched(pair=pair)
    pair.llama = make(n_ubatch=1)
    alone = {name: pair.alone(name, 3 * N) for name in PROMPTS}
    pair.end(pair.both(3 * N))
    assert pair.n_turns > N
    assert pair.n_batches > N
    for name, (tokens, rows) in alone.items():
        n = len(pair.sampled[name])
        assert pair.sampled[name] == tokens[:n]
        np.testing.assert_array_equal(pair.rows[name], rows[:n])
    for told in pair.told.values():
        assert [begins for begins, _ in told] == [True, False] * (len(told) // 2)


def test_requests_that_are_not_decoded_together(exact):
    exact.is_together = False
    check(exact)
    assert exact.n_batches == 0


def test_the_time_that_an_app_waits_for_a_request_aside_is_others(patched, make):
    class Timed(Pair):
        @hookimpl
        def llmaas_request_end(self, request, stats):
            self.stats[request.app] = stats

    pair = Timed()
    pair.is_together, pair.stats = False, {}
    patched(pair=pair)
    pair.llama = make(n_ubatch=1)
    a = pair.both(3)
    pair.seats["a"].leave()
    pair.seats["b"].enter(100.0)
    next(pair.b)
    pair.b.close()
    pair.seats["a"].enter()
    a.close()
    assert 100 < pair.stats["b"].decode_away_s < pair.stats["b"].decode_s < 130
    assert pair.stats["a"].decode_s < 30


def test_the_cells_of_ended_requests_are_saved_and_freed(exact):
    a = check(exact)
    n_saved = exact.n_saved
    a.close()
    assert exact.n_saved == n_saved + 1
    assert exact.llama.n_tokens == len(PROMPTS["a"]) + N - 1
    assert sequences(exact.llama)[1:].count(-1) == N_SEATS - 1  # b's are aside
    exact.seats["b"].enter()
    exact.b.close()
    assert exact.n_saved == n_saved + 2
    assert exact.llama.n_tokens == len(PROMPTS["b"]) + N - 2
    assert sequences(exact.llama) == [len(PROMPTS["b"]) + N - 3, *[-1] * N_SEATS]
    assert exact.alone("a", N)[0] == exact.sampled["a"]


def test_a_request_whose_token_is_evaluated_may_end_instead(exact):
    a = exact.both(3)
    seat, b = exact.seats["a"], exact.seats["b"]
    seat.leave()
    assert b.evaluate_with([seat]) > 0
    for one, generator in ((b, exact.b), (seat, a)):
        one.enter()
        generator.close()
    assert sequences(exact.llama) == [len(PROMPTS["a"]) + 1, *[-1] * N_SEATS]
    check(exact)


def test_a_new_request_leaves_those_aside_alone(exact):
    alone = exact.alone("b", N)[0]

    def ask():
        b, rows, exact.b, exact.rows = exact.b, exact.rows, None, {}
        with serving_context(None, "c"):
            generator = exact.llama.generate(PROMPTS["a"][:40], temp=0.0)
            next(generator)
            generator.close()
        exact.b, exact.rows = b, rows

    exact.before_b = ask
    a = check(exact)
    assert exact.sampled["b"] == alone[: N - 1]
    a.close()


def test_the_app_sees_only_its_own_request(exact):
    a = check(exact)
    llama = exact.llama
    memory = llama_cpp.llama_get_memory(llama.ctx)
    assert (llama_cpp.llama_n_seq_max(llama.ctx), llama_cpp.llama_n_ctx(llama.ctx)) == (1, 256)
    assert llama_cpp.llama_memory_seq_rm(memory, -1, 4, -1)  # all of the app's sequences
    assert len([end for end in sequences(llama) if end > 3]) == 1
    del a


def test_requests_aside_when_the_engine_is_closed(exact):
    a = exact.both(3)
    exact.llama.close()
    with pytest.raises(ReferenceError):
        exact.seats["b"].enter()
    a.close()
    exact.b.close()


def test_requests_aside_that_are_lost(exact):
    for _ in range(3 * N_SEATS):
        a = exact.both(3)
        a.close()
        cycle = [exact.b]
        cycle.append(cycle)  # so that the collector frees the generator, where nothing can be done
        exact.b, exact.seats = None, {}
        del cycle
        gc.collect()
    check(exact)


def test_a_batch_of_which_nobody_used_the_results(exact):
    """A plugin that fails after the batch costs nothing but the batch."""
    expected = exact.alone("b", N)[0]
    a = exact.both(3)
    seat, b = exact.seats["a"], exact.seats["b"]
    seat.leave()
    for _ in range(3):
        assert b.evaluate_with([seat]) > 0
    b.enter()
    b.leave()
    seat.enter()
    a.close()
    exact.is_together = False
    found = exact.sampled["b"]
    b.enter()
    exact.b.close()
    assert found == expected[: len(found)]
    check(exact)
