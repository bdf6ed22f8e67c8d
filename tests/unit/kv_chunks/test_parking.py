"""Parked contexts: their places, and the guarantee that an app's own context finds room."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from interrupting import interruptions
from parked_cells import N_CTX, N_SPARE, App, tokens
from soak import scale

from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_plugins.kv_chunks.parking import parked_contexts
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts

RNG = np.random.default_rng(5)


def piece(n):
    return RNG.integers(300, 4000, n)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", SHAPE_TINY)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    yield model
    llama_cpp.llama_model_free(model)


@pytest.fixture
def app(model):
    app = App(model)
    yield app
    app.close()


A, B, C = (tokens(piece(n)) for n in (90, 100, 80))
SYSTEM = tokens(piece(40))


def test_two_contexts_in_turn(app):
    assert app.ask(A) is None
    assert app.ask(B) is None
    assert app.parking.n_cells == app.parking.n_parked(tokens(A, C), b"") == len(A)
    assert app.parking.n_parked(A, b"another") == app.parking.n_parked(C, b"") == 0
    longer = tokens(A, piece(10))
    assert app.ask(longer) == len(A)
    app.check()
    assert app.parking.n_cells == len(B)
    assert app.ask(tokens(B, piece(5))) == len(B)
    app.check()
    assert app.parking.n_cells == len(longer)
    assert app.parking.stats() == {
        "parked_contexts": 1,
        "parked_cells": len(longer),
        "parks": 3,
        "takes": 2,
        "taken_tokens": len(A) + len(B),
        "parked_given_up": 0,
    }


def test_a_context_that_comes_back_keeps_its_label(app):
    app.ask(A)
    app.ask(B)
    (label,) = app.engine.parked
    longer = tokens(A, piece(10))
    app.ask(longer)
    assert app.engine.parked.current == label
    assert app.positions(label) == list(range(len(A)))  # not the new cells
    app.ask(tokens(B, piece(5)))
    app.check()
    assert app.engine.parked.others() == {label}
    assert app.positions(label) == list(range(len(longer)))


def test_a_kept_label_is_cut_where_the_context_changes(app):
    app.ask(A)
    app.ask(B)
    app.ask(tokens(A, piece(10)))
    label = app.engine.parked.current
    changed = tokens(A[:85], piece(30))
    app.ask(changed)
    assert app.positions(label) == list(range(85))
    app.check()
    app.ask(B)
    assert app.parking.n_parked(changed, b"") == len(changed) == len(app.positions(label))
    app.check()


def test_a_kept_label_takes_no_cells_beside_a_full_context(app):
    """Both contexts fill the room: the label of one that came back is on sequence 0's cells."""
    first, second, third = (tokens(piece(N_CTX)) for _ in range(3))
    app.ask(first)
    app.ask(second)
    app.ask(first)
    assert app.engine.parked.current is not None
    app.evaluate(third)
    assert len(app.cells()) == N_CTX + N_SPARE
    app.ask(second)
    app.check()
    assert app.parking.n_parked(third, b"") == len(third)


def test_cells_evaluated_anew_become_those_of_a_parked_context(app):
    """Llama evaluates the last token again, into a cell beside the one that is parked."""
    app.ask(tokens(SYSTEM, A))
    app.ask(tokens(SYSTEM, B[:10]))
    app.ask(piece(20))
    app.ask(tokens(SYSTEM, B[:10]))
    app.ask(SYSTEM)
    assert len(app.positions(app.engine.parked.current)) == len(SYSTEM) - 1
    app.ask(tokens(SYSTEM, C))
    app.ask(piece(30))
    app.check()
    assert len(app.cells()) == len(SYSTEM) + len(A) + 20 + len(C) + 30


def test_a_label_that_the_host_took_is_made_anew(app):
    app.ask(A)
    app.ask(B)
    app.ask(A)
    for sequence in (*app.engine.parked,):
        llama_cpp.llama_memory_seq_rm(app.memory, sequence, -1, -1)
        app.engine.parked.discard(sequence)
    app.ask(C)
    app.check()
    assert app.ask(tokens(A, C)) == len(A)
    app.check()


def test_another_apps_context_keeps_no_label_of_this_one(app):
    """Its first tokens may be equal, but shared cells would stay longer."""
    app.ask(A, b"one")
    app.ask(B, b"one")
    app.ask(A, b"one")
    app.root = b"two"  # as if the host had given these cells to another app
    app.ask(C, b"one")
    assert app.parking.n_parked(A, b"two") == len(A)
    assert app.parking.n_parked(A, b"one") == 0


def test_a_context_that_goes_on_is_not_parked(app):
    for n in (50, 70, 90):
        app.ask(A[:n])
    app.ask(tokens(A[:80], piece(20)))  # left a part shorter than a chunk
    assert app.parking.stats()["parks"] == 0
    app.ask(tokens(A[:70], piece(30)))
    assert app.parking.stats()["parks"] == 1
    app.check()


def test_a_common_beginning_is_there_once(app):
    app.ask(tokens(SYSTEM, A))
    app.ask(tokens(SYSTEM, B))
    app.ask(tokens(SYSTEM, C))
    app.check()
    assert app.parking.n_cells == len(SYSTEM) + len(A) + len(B)
    assert len(app.positions(0)) == len(SYSTEM) + len(C)
    n_used = len(app.cells())
    assert n_used == len(SYSTEM) + len(A) + len(B) + len(C)


def test_contexts_that_begin_alike_in_turn(app):
    """The cells of their beginning stay in sequence 0, whichever of them it holds."""
    talks = [tokens(SYSTEM, each) for each in (A[:50], B[:60])]
    for talk in talks:
        app.ask(talk)
    for i in (0, 1, 0, 1):
        talks[i] = tokens(talks[i], piece(5))
        app.ask(talks[i])
        app.check()
        assert len(app.cells()) == sum(map(len, talks)) - len(SYSTEM)
    assert app.parking.stats()["takes"] == 4


def test_equal_beginnings_that_were_evaluated_apart_become_one(app):
    """Asked for the same tokens again, Llama evaluates the last one into a cell of its own."""
    app.ask(tokens(SYSTEM, A))
    app.ask(SYSTEM)
    app.ask(tokens(SYSTEM, C))
    assert len(app.cells()) == len(SYSTEM) + len(A) + 1 + len(C)
    app.ask(B)
    app.check()
    assert app.parking.n_cells == len(SYSTEM) + len(A) + len(C)
    assert len(app.cells()) == len(SYSTEM) + len(A) + len(C) + len(B)


def test_a_context_that_another_goes_on_with_needs_no_place_of_its_own(app):
    """The app evaluated the whole context without asking for the parked one."""
    app.ask(A)
    app.ask(B)
    app.evaluate(tokens(A, piece(10)))
    app.ask(C)
    app.check()
    assert len(app.engine.parked) == 1
    assert app.parking.n_cells == len(A) + 10


def test_a_prompt_that_takes_a_beginning_leaves_the_rest_parked(app):
    app.ask(A)
    app.ask(B)
    assert app.ask(tokens(A[:60], piece(30))) == 60
    app.check()
    assert app.parking.n_cells == len(A) + len(B)
    app.ask(C)
    assert app.ask(A) == len(A)
    app.check()


def test_the_oldest_gives_way_as_a_whole(app):
    app.ask(A)
    app.ask(B)
    app.ask(C)
    app.ask(tokens(piece(30)))  # 90 + 100 + 80 tokens are 14 too many
    app.check()
    assert {len(parked.tokens) for parked in app.parking._contexts} == {len(B), len(C)}
    assert app.ask(A) is None


def test_a_beginning_that_others_have_stays(app):
    app.ask(tokens(SYSTEM, A))
    app.ask(tokens(SYSTEM, B))
    app.ask(tokens(piece(110)))
    app.ask(C)
    app.check()
    assert app.parking.n_cells <= N_SPARE
    assert app.ask(tokens(SYSTEM, B)) == len(SYSTEM) + len(B)


def test_a_context_longer_than_the_room_is_not_parked(model):
    for n_spare in (0, 64):
        app = App(model)
        app.engine.n_spare = n_spare
        app.parking = ParkedContexts(app.engine)
        app.ask(A)
        app.ask(B)
        app.check()
        assert app.parking.stats()["parks"] == 0
        app.close()


def test_a_full_context_beside_full_parked_ones(app):
    """Each prompt fills the whole size that the app requested."""
    full = [tokens(SYSTEM, piece(N_CTX - len(SYSTEM))) for _ in range(3)]
    for prompt in full * 2:
        app.ask(prompt)
        app.check()
        assert len(app.cells()) <= N_CTX + N_SPARE
    assert app.parking.n_cells > 0


def test_more_contexts_than_sequences(app):
    prompts = [tokens(piece(20)) for _ in range(9)]
    for prompt in prompts:
        app.ask(prompt)
        app.check()
    assert app.parking.n_cells == 5 * 20
    assert app.ask(prompts[-2]) == 20
    assert app.ask(prompts[0]) is None


def test_cells_that_the_app_took_away_are_not_parked(app):
    app.ask(A)
    app.remove(50)
    app.parking.switch(B, app.tokens)
    assert app.parking.n_cells == 0
    app.tokens = app.tokens[:50]
    app.parking.switch(B, app.tokens)
    assert app.parking.n_cells == 50


def test_what_the_host_gave_up_is_forgotten(app):
    app.ask(A)
    app.ask(B)
    while app.engine.parked:
        llama_cpp.llama_memory_seq_rm(app.memory, app.engine.parked.pop(), -1, -1)
    assert app.parking.n_cells == 0
    assert app.ask(A) is None
    assert app.parking.stats()["parked_given_up"] == 1
    app.check()


def test_giving_up(app):
    app.ask(A)
    app.ask(B)
    app.parking.clear()
    app.check()
    assert len(app.cells()) == len(B)
    assert app.ask(A) is None
    app.ask(B)
    assert app.ask(A) == len(A)
    app.parking.clear()
    app.check()
    assert not app.engine.parked
    assert len(app.cells()) == len(A)


def test_what_must_be_forgotten_is_gone_with_the_next_request(app):
    app.ask(A)
    app.ask(B)
    app.parking.clear_later()
    assert app.ask(A) is None
    app.check()
    assert len(app.engine.parked) == 1  # left by this request
    assert app.ask(B) == len(B)


def test_apps_that_share_no_chunks_share_no_parked_context(app):
    """Their equal beginnings have separate cells: shared ones would stay longer."""
    first = A[:60]
    app.ask(first, b"one")
    app.ask(C, b"one")
    assert app.ask(first, b"two") is None
    app.ask(C[:20], b"two")
    app.check()
    assert app.parking.n_cells == 2 * len(first) + len(C)
    assert len(app.engine.parked) == 3
    assert app.ask(first, b"one") == len(first)
    assert app.ask(C, b"two") == 20  # its own
    app.check()


SWITCHES = {
    "park": ([A], tokens(piece(30))),
    "park and share": ([tokens(SYSTEM, A), tokens(SYSTEM, B)], tokens(SYSTEM, C)),
    "park and resume": ([tokens(SYSTEM, A), tokens(SYSTEM, B)], tokens(SYSTEM, A)),
    "replace": ([A[:60], C, A], C),
    "evict": ([A, B, C], tokens(piece(30))),
    "evict the sixth": ([A[i : i + 20] for i in range(0, 60, 10)], B),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.slow
def test_ctrl_c_anywhere_gives_no_context_the_cells_of_another(model, name):
    """The host then empties sequence 0, but Ctrl-C may keep it from freeing parked contexts."""
    before, prompt = SWITCHES[name]
    fresh = App(model, n_spare=0)
    for interruption in interruptions(parked_contexts, least=20):
        app = App(model)
        for each in before:
            app.ask(each)
        with interruption:
            app.parking.switch(prompt, app.tokens)
        app.remove(0)
        app.tokens = tokens()
        for each in (C, A, *before, B):
            app.ask(each)
            app.check()
            fresh.ask(each)
            assert np.allclose(app.keys(), fresh.keys(), atol=0.02), interruption.where
        app.close()
    fresh.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_whatever_is_asked_the_rules_hold(model, seed):
    """Contexts grow, are cut, edited and left, in an ever more fragmented cache."""
    rng = np.random.default_rng(seed)
    app, fresh = App(model), App(model, n_spare=0)
    systems = [tokens(rng.integers(300, 4000, n)) for n in (0, 30, 70)]
    contexts = [systems[rng.integers(3)] for _ in range(7)]
    for _ in range(scale(60, 2000)):
        i = rng.integers(len(contexts))
        kept = (
            contexts[i][: rng.integers(len(contexts[i]) + 1)] if rng.random() < 0.3 else contexts[i]
        )
        grown = tokens(kept, rng.integers(300, 4000, rng.integers(not len(kept), 60)))
        contexts[i] = grown if len(grown) <= N_CTX else tokens(systems[rng.integers(3)], piece(20))
        if rng.random() < 0.05:
            app.parking.clear()
        app.ask(contexts[i], b"one" if i % 3 else b"two")
        app.check()
        fresh.ask(contexts[i])
        assert np.allclose(app.keys(), fresh.keys(), atol=0.02)
    assert app.parking.stats()["takes"] > 5
    app.close()
    fresh.close()
