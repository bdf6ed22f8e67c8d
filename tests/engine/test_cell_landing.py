"""Cells that plugins fill themselves: bit for bit those that llama.cpp loads from the same blob."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp
import numpy as np
import pytest
from batches import TOKENS
from claiming import CELLS, Claimer, created, decode, loaded, native, step

from llmaas_plugins._native import blob_init, blob_probe, landings_fit

N_CTX, N = 512, 200
SOME = [TOKENS[i * i % len(TOKENS)] for i in range(N)]
OTHERS = [TOKENS[i * 7 % len(TOKENS)] for i in range(N)]
MORE = SOME[:20]
PARKED, PARKED_TOO = 2, 3
N_HEADS = 24, 12
"""Bytes of a blob before its cells and the first layer's K; bytes before each K and V."""


class Engine:
    """A context, and its cells as a plugin sees them."""

    def __init__(self, ctx, context):
        self.ctx, self.memory = ctx, context.cells()
        self._sequences = llama_cpp.llama_get_memory(ctx)

    def evaluate(self, tokens, start=0):
        return step(self.ctx, tokens, start)

    def drop(self, sequence=0):
        assert llama_cpp.llama_memory_seq_rm(self._sequences, sequence, -1, -1)

    def relabel(self, source, target):
        llama_cpp.llama_memory_seq_cp(self._sequences, source, target, -1, -1)
        self.drop(source)

    def park(self, sequence, n):
        """Place a context of ``n`` tokens in the next cells."""
        assert decode(self.ctx, OTHERS[:n], 0) == 0
        self.relabel(0, sequence)

    def end(self, sequence=0):
        return llama_cpp.llama_memory_seq_pos_max(self._sequences, sequence) + 1

    def blob(self, sequence=0):
        found = np.empty(llama_cpp.llama_state_seq_get_size(self.ctx, sequence), np.uint8)
        n = llama_cpp.llama_state_seq_get_data(self.ctx, pointer(found), found.nbytes, sequence)
        assert n == found.nbytes
        return found

    def load(self, blob, sequence=0):
        n = llama_cpp.llama_state_seq_set_data(self.ctx, pointer(blob), blob.nbytes, sequence)
        assert n == blob.nbytes

    def land(self, blob, sequence=0):
        """Return where a blob's rows belong; the engine reads only the blob's headers."""
        geometry, n_cells = blob_probe(blob)
        headers = np.zeros_like(blob)
        blob_init(geometry, headers, range(n_cells))
        landings = self.memory.land(headers, sequence, geometry.n_planes)
        assert landings is None or landings_fit(geometry, landings, n_cells)
        return landings


def pointer(array):
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


def fill(landings, blob):
    """Copy a blob's rows to their places."""
    n_cells = int(blob[12:16].view(np.uint32)[0])
    at = N_HEADS[0] + 12 * n_cells
    for address, apart, n_bytes, n_pieces in landings.tolist():
        at += N_HEADS[1]
        for i in range(n_pieces):
            ctypes.memmove(address + i * apart, blob.ctypes.data + at, n_bytes)
            at += n_bytes
    assert at == blob.nbytes


@contextlib.contextmanager
def opened(path, **settings):
    settings = {"n_ctx": N_CTX, "n_batch": N_CTX, "n_seq_max": 8, "kv_unified": True} | settings
    plugin = Claimer()
    with native(plugin=plugin), loaded(path) as model, created(model, **settings) as ctx:
        yield Engine(ctx, plugin.contexts[0])


@pytest.fixture(params=CELLS)
def engine(request, family):
    with opened(family("llama"), **CELLS[request.param]) as engine:
        yield engine


@pytest.fixture
def saved(engine):
    """Return a context's blob; the engine is empty again."""
    engine.evaluate(SOME)
    blob = engine.blob()
    engine.drop()
    return blob


def test_landed_cells_are_those_that_stock_llama_cpp_loads(engine, saved):
    engine.load(saved)
    expected = engine.evaluate(MORE, N)
    engine.drop()
    engine.evaluate(OTHERS)
    engine.drop()
    landings = engine.land(saved)
    assert engine.end() == N
    fill(landings, saved)
    assert np.array_equal(engine.blob(), saved)
    assert np.array_equal(engine.evaluate(MORE, N), expected)


def test_the_rows_stay_as_they_are_until_somebody_writes_there(engine, saved):
    engine.evaluate(OTHERS)
    before = engine.blob()
    engine.drop()
    engine.land(saved)
    assert np.array_equal(engine.blob(), before)


def test_behind_cells_of_other_sequences(engine, saved):
    engine.park(PARKED, 30)
    engine.park(PARKED_TOO, 25)
    parked = engine.blob(PARKED_TOO)
    engine.load(saved)
    expected = engine.evaluate(MORE, N)
    engine.drop()
    fill(engine.land(saved, sequence=1), saved)
    engine.relabel(1, 0)
    assert np.array_equal(engine.blob(), saved)
    assert np.array_equal(engine.evaluate(MORE, N), expected)
    assert np.array_equal(engine.blob(PARKED_TOO), parked)


@pytest.mark.parametrize(
    ("n_before", "n_parked"),
    [(30, 40), (N // 2, 40), (N // 2, (N_CTX - N) // 2)],
    ids=["two runs", "of one length", "half a channel apart"],
)
def test_between_cells_of_other_sequences_there_is_no_landing(engine, saved, n_before, n_parked):
    """Some free cells lie before the other sequence's cells, and the rest behind them."""
    engine.park(PARKED, n_before)
    engine.park(PARKED_TOO, n_parked)
    parked = engine.blob(PARKED_TOO)
    engine.drop(PARKED)
    assert engine.land(saved) is None
    engine.drop()
    assert engine.end() == 0
    assert np.array_equal(engine.blob(PARKED_TOO), parked)
    engine.load(saved)  # loads as usual
    assert np.array_equal(engine.blob(), saved)
    assert np.array_equal(engine.blob(PARKED_TOO), parked)


def test_a_blob_that_the_engine_refuses(engine, saved):
    engine.park(PARKED, 30)
    parked = engine.blob(PARKED)
    geometry, _ = blob_probe(saved)
    cut = saved[:-1].copy()
    foreign = saved.copy()
    foreign[N_HEADS[0] + 12 * N : N_HEADS[0] + 12 * N + 4] ^= 64  # the type of the keys
    for blob in (cut, foreign):
        assert engine.memory.land(blob, 0, geometry.n_planes) is None
        assert engine.end() == 0
    assert np.array_equal(engine.blob(PARKED), parked)
    engine.load(saved)
    assert np.array_equal(engine.blob(), saved)


def test_more_cells_than_the_context_has(engine, saved):
    geometry, _ = blob_probe(saved)
    long = np.zeros(N_CTX * saved.nbytes, np.uint8)
    long[:16] = saved[:16]
    long[12:16] = np.array([N_CTX + 1], np.uint32).view(np.uint8)
    assert engine.memory.land(long, 0, geometry.n_planes) is None
    assert engine.end() == 0


@pytest.mark.parametrize("n_more", [-1, 1])
def test_another_number_of_planes(engine, saved, n_more):
    geometry, _ = blob_probe(saved)
    assert engine.memory.land(saved, 0, geometry.n_planes + n_more) is None
    engine.drop()
    engine.load(saved)
    assert np.array_equal(engine.blob(), saved)


def test_released_cells_are_landed_on(engine, saved):
    assert engine.memory.release()
    fill(engine.land(saved), saved)
    assert np.array_equal(engine.blob(), saved)


def test_two_caches_have_no_landing(family):
    with opened(family("gemma3"), swa_full=False, n_seq_max=2) as engine:
        engine.evaluate(SOME[:60])
        blob = engine.blob()
        expected = engine.evaluate(MORE, 60)
        engine.drop()
        assert engine.land(blob) is None
        assert engine.end() == 0
        engine.load(blob)
        assert np.array_equal(engine.evaluate(MORE, 60), expected)


def test_two_contexts_of_one_model(family):
    plugin = Claimer()
    with (
        native(plugin=plugin),
        loaded(family("llama")) as model,
        created(model, n_ctx=N_CTX, n_batch=N_CTX) as a,
        created(model, n_ctx=N_CTX, n_batch=N_CTX) as b,
    ):
        one, two = (Engine(*each) for each in zip((a, b), plugin.contexts, strict=True))
        one.evaluate(SOME)
        two.evaluate(OTHERS)
        blob = one.blob()
        fill(two.land(blob), blob)
        assert np.array_equal(two.blob(), blob)
        assert np.array_equal(two.evaluate(MORE, N), one.evaluate(MORE, N))


def test_a_freed_context_and_a_suite_that_is_gone(family):
    plugin, blob = Claimer(), np.zeros(64, np.uint8)
    with loaded(family("llama")) as model:
        with native(plugin=plugin):
            with created(model):
                freed = plugin.contexts[0].cells()
            left = contextlib.ExitStack()
            left.enter_context(created(model))
            alive = plugin.contexts[1].cells()
            with pytest.raises(ReferenceError):
                freed.land(blob, 0, 8)
        with left, pytest.raises(ReferenceError):
            alive.land(blob, 0, 8)
