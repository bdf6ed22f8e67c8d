"""Attention to the chunks of a context that left the engine and came back."""

from __future__ import annotations

import contextlib
import itertools

import llama_cpp
import numpy as np
import pytest
from claiming import Claimer, created, decode, loaded, native

from llmaas_plugins.kv_chunks.compression.attention import ROW_STEP, ChunkAttention
from llmaas_plugins.kv_chunks.transfer.cells import KVCells

TOKENS = tuple(np.random.default_rng(3).integers(300, 4000, 200).tolist())
OTHERS = tuple(np.random.default_rng(4).integers(300, 4000, 200).tolist())
N, MORE = 110, ((110, 130), (130, 131), (131, 132))
PARKED, PARKED_TOO = 2, 3


class Engine:
    """A context as kv_chunks sees it: sequence 0, a scratch sequence, and parked ones."""

    def __init__(self, ctx, context):
        self.ctx = ctx
        self.cells = KVCells(ctx)
        self.density = context.density()
        self.attention = ChunkAttention(context)
        self._memory = llama_cpp.llama_get_memory(ctx)

    def evaluate(self, start, end, tokens=TOKENS):
        assert decode(self.ctx, tokens[start:end], start) == 0

    def go_on(self, tokens=TOKENS):
        """Evaluate the tokens after the first ``N``; return the attention that these received."""
        self.density.take(256)
        for start, end in MORE:
            self.evaluate(start, end, tokens)
        return self.density.read(MORE[-1][1])

    def save(self, start, end):
        blob = np.empty(self.cells.size(start, end), dtype=np.uint8)
        assert self.cells.read(start, end, blob) == blob.nbytes
        return blob

    def relabel(self, source, target):
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.drop(source)

    def drop(self, sequence, start=0):
        assert llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def place(self, kept, n, cells=None):
        self.density.place(kept, n, cells)
        self.attention.announce(kept, n)

    def restore(self, *blobs):
        for blob in blobs:
            assert self.cells.append(blob, self.cells.end())
        self.cells.finish()


@pytest.fixture(params=[0, 1], ids=["softmax", "flash"])
def engine(request, reference_model):
    """Yield an engine with room for several contexts."""
    plugin = Claimer()
    settings = {"n_ctx": 512, "n_batch": 512, "n_seq_max": 8, "kv_unified": True}
    with (
        native(plugin=plugin),
        loaded(reference_model) as model,
        created(model, **settings, flash_attn_type=request.param) as ctx,
    ):
        yield Engine(ctx, plugin.contexts[0])


@pytest.fixture
def stayed(engine):
    """Return the attention in a context that never leaves; clear that context."""
    engine.evaluate(0, N)
    expected = engine.go_on()
    assert expected[1].all()
    engine.drop(0, N)
    return expected


def assert_same(found, expected):
    """Allow differences of other batches and another cell order; neighbors differ by more."""
    assert np.array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-2)
    assert np.abs(np.diff(expected[0]) / expected[0][1:]).max() > 0.2


@pytest.mark.parametrize("kept", [0, 48])
@pytest.mark.parametrize("cuts", [(), (96,), (64, 80)], ids=["one part", "two", "three"])
def test_restored_contexts_get_what_those_get_that_stayed(engine, stayed, kept, cuts):
    bounds = (kept, *cuts, N)
    blobs = [engine.save(*part) for part in itertools.pairwise(bounds)]
    engine.drop(0, kept)
    engine.place(kept, N)
    engine.restore(*blobs)
    assert_same(engine.go_on(), stayed)


def test_in_the_cells_between_other_contexts(engine, stayed):
    blob = engine.save(0, N)
    engine.drop(0)
    for sequence, n in ((PARKED, 30), (PARKED_TOO, 25)):
        engine.place(0, 0)
        engine.evaluate(0, n, OTHERS)
        engine.relabel(0, sequence)
    engine.drop(PARKED)
    engine.place(0, N)
    engine.restore(blob)  # 30 cells before those of the other one, the rest behind them
    assert_same(engine.go_on(), stayed)


def test_where_a_part_is_recomputed(engine, stayed):
    first, last = engine.save(32, 64), engine.save(80, N)
    engine.drop(0)
    engine.place(0, N)
    engine.evaluate(0, 32)
    engine.restore(first)
    engine.evaluate(64, 80)
    engine.restore(last)
    assert_same(engine.go_on(), stayed)


def test_where_less_comes_back_than_was_said(engine, stayed):
    blob = engine.save(0, 64)
    engine.drop(0)
    engine.place(0, N)
    engine.restore(blob)
    engine.evaluate(64, N)
    assert_same(engine.go_on(), stayed)


def test_parked_contexts_whose_cells_lie_anyhow(engine, stayed):
    """One of two surrounding contexts left, so later positions lie in earlier cells."""
    engine.drop(0)
    engine.place(0, 0)
    engine.evaluate(0, 40, OTHERS)
    engine.relabel(0, PARKED)
    engine.place(0, 0)
    engine.evaluate(0, 60)
    engine.drop(PARKED)
    engine.evaluate(60, N)
    where = engine.density.cells(N)
    assert (np.diff(where[0]) < 0).any()
    engine.relabel(0, PARKED_TOO)
    engine.place(0, 0)
    engine.evaluate(0, 70, OTHERS)
    engine.relabel(0, PARKED)
    engine.place(0, N, where)
    engine.relabel(PARKED_TOO, 0)
    assert_same(engine.go_on(), stayed)


def test_cells_that_nobody_announced_get_nothing(engine, stayed):
    blob = engine.save(48, N)
    engine.drop(0, 48)
    engine.place(48, N - 1)
    engine.restore(blob)
    sums, counts = engine.go_on()
    assert np.array_equal(counts[:48], stayed[1][:48])
    assert np.array_equal(counts[N:], stayed[1][N:])
    assert not counts[48:N].any()
    assert not sums[48:N].any()


def test_chunks_get_what_their_positions_get(engine):
    engine.evaluate(0, 40)
    sums, counts = engine.attention.take(40)
    exact_sums, exact_counts = engine.density.read(40)
    for i, part in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
        share = counts[i] / exact_counts[part].sum()  # one of ROW_STEP scores was sampled
        assert 0.5 / ROW_STEP < share < 2 / ROW_STEP
        exact = exact_sums[part].sum() / exact_counts[part].sum()
        assert sums[i] / counts[i] == pytest.approx(exact, rel=0.3)
    assert not any(each.any() for each in engine.attention.take(40))


def test_attention_adds_up_over_calls(engine):
    """Two takes add up to one; attention counts only from a chunk's current tokens on."""
    engine.evaluate(0, 40)
    parts = [engine.attention.take(40)]
    engine.evaluate(40, 75)
    parts.append(engine.attention.take(75))
    engine.drop(0)
    engine.evaluate(0, 40)
    engine.evaluate(40, 75)
    sums, counts = engine.attention.take(75)
    assert np.array_equal(counts[:3] - parts[0][1], parts[1][1][:3])
    np.testing.assert_allclose(sums[:3], parts[0][0] + parts[1][0][:3], rtol=1e-6)
    assert np.array_equal(counts[3:], parts[1][1][3:])


def test_a_context_without_taps_has_no_attention_and_no_error(reference_model):
    plugin = Claimer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(native(plugin=plugin))
        model = stack.enter_context(loaded(reference_model))
        with created(model):
            pass
        attention = ChunkAttention(plugin.contexts[0])
    attention.announce(0, 20)
    assert attention.cells(20) is None
    sums, counts = attention.take(20)
    assert sums.tolist() == counts.tolist() == [0, 0]
    attention.close()
