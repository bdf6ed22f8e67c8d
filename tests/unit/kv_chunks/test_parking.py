"""Parked contexts: their places, and the guarantee that an app's own context finds room."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
import pytest
from interrupting import interruptions
from soak import scale

from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_hooks import common_prefix
from llmaas_plugins.kv_chunks.parking import parked_contexts
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES

N_CTX, N_SPARE, N_TOGETHER = 256, 256, 64
RNG = np.random.default_rng(5)


@dataclass(eq=False)
class Engine:
    """The parts of an engine that ``ParkedContexts`` uses."""

    ctx: int
    n_spare: int = N_SPARE
    parked: set = field(default_factory=set)


class App:
    """An app that evaluates prompts as ``Llama`` does, on a context with spare cells."""

    def __init__(self, model, n_spare=N_SPARE):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = N_CTX + n_spare, N_TOGETHER
        params.n_seq_max, params.kv_unified = PARKED_SEQUENCES.stop, True
        params.n_threads = params.n_threads_batch = 1
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(N_TOGETHER, 0, 1)
        self.engine = Engine(self.ctx, n_spare)
        self.parking = ParkedContexts(self.engine)
        self.tokens, self.root = tokens(), b""

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)

    def ask(self, prompt, root=b""):
        """Evaluate a prompt; return how many tokens were brought back, or None."""
        left, self.root = self.root, root
        taken = self.parking.switch(prompt, self.tokens, root=root, resident_root=left)
        if taken is None and left != root:  # left by another app's prompt
            self.tokens = tokens()
        if taken is not None:
            self.tokens = prompt[: taken.n_tokens]
            assert self.positions(0) == list(range(taken.n_tokens))
        self.evaluate(prompt)
        return None if taken is None else taken.n_tokens

    def evaluate(self, prompt):
        n_kept = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        assert llama_cpp.llama_memory_seq_rm(self.memory, 0, n_kept, -1)
        for start in range(n_kept, len(prompt), N_TOGETHER):
            self.decode(prompt[start : start + N_TOGETHER], start)
        self.tokens = prompt

    def decode(self, piece, start):
        self.batch.n_tokens = len(piece)
        for i, token in enumerate(piece):
            self.batch.token[i], self.batch.pos[i] = int(token), start + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = False
        self.batch.logits[len(piece) - 1] = True
        assert llama_cpp.llama_decode(self.ctx, self.batch) == 0

    def cells(self):
        """Return position and sequences of each used cell."""
        blob = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self.ctx))()
        assert llama_cpp.llama_state_get_data(self.ctx, blob, len(blob)) == len(blob)
        blob = bytes(blob)
        at = 4 + struct.unpack_from("<I", blob)[0]  # after the architecture's name
        n_streams, n_cells = struct.unpack_from("<II", blob, at)
        assert n_streams == 1
        at, found = at + 8, []
        for _ in range(n_cells):
            position, n = struct.unpack_from("<iI", blob, at)
            found.append((position, set(struct.unpack_from(f"<{n}i", blob, at + 8))))
            at += 8 + 4 * n
        return found

    def positions(self, sequence):
        return sorted(position for position, labels in self.cells() if sequence in labels)

    def check(self):
        """Assert both rules of ``ParkedContexts``, and the content of sequences."""
        cells = self.cells()
        n_parked = sum(bool(labels - {0}) for _, labels in cells)
        assert n_parked == self.parking.n_cells <= self.engine.n_spare
        assert self.positions(0) == list(range(len(self.tokens)))
        contexts = self.parking._contexts
        assert {parked.sequence for parked in contexts} == self.engine.parked
        assert len(contexts) < len(PARKED_SEQUENCES)
        for parked in contexts:
            assert self.positions(parked.sequence) == list(range(len(parked.tokens)))

    def keys(self, sequence=0):
        """Return a sequence's keys by position; they depend on token and position alone."""
        blob = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self.ctx, sequence))()
        llama_cpp.llama_state_seq_get_data(self.ctx, blob, len(blob), sequence)
        blob = bytes(blob)
        (n_cells,) = struct.unpack_from("<I", blob, 12)
        cells = np.frombuffer(blob, "<i4", 3 * n_cells, 16).reshape(n_cells, 3)
        start = 16 + 12 * n_cells + 8 + 12  # V's order, layers; the keys' type and row
        n = SHAPE_TINY.n_head_kv * SHAPE_TINY.head_dim
        keys = np.frombuffer(blob, "<f2", n_cells * n, start).reshape(n_cells, n)
        return keys[np.argsort(cells[:, 0])]


def tokens(*pieces):
    return np.concatenate([np.zeros(0, dtype=np.int32), *pieces]).astype(np.int32)


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
    llama_cpp.llama_memory_seq_rm(app.memory, 0, 50, -1)
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
        llama_cpp.llama_memory_seq_rm(app.memory, 0, -1, -1)
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
