"""Giving back the memory of KV cells while none is in use: the context is then as good as new."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from batches import TOKENS
from claiming import CELLS, OFF, ON, Claimer, created, decode, loaded, native, step

MIB = 1 << 20
N_CTX = 1024
MANY = 65536
"""So many cells that malloc takes them from the system, not from memory used before."""


@pytest.fixture(params=CELLS)
def settings(request):
    return CELLS[request.param] | {"n_ctx": N_CTX, "n_batch": N_CTX, "n_ubatch": 64}


@pytest.fixture
def plugin():
    return Claimer()


@pytest.fixture
def opened(family, plugin):
    """Return a function that makes a context on the llama family with the given settings."""
    with native(plugin=plugin), loaded(family("llama")) as model:
        yield functools.partial(created, model)


@pytest.fixture
def cells(plugin):
    """Return a function that yields the memory of the new context's cells."""

    def cells():
        return plugin.contexts[-1].cells()

    return cells


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def tokens(n):
    return [TOKENS[i * i % len(TOKENS)] for i in range(n)]


def empty(ctx):
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(ctx), 0, -1, -1)


def state(ctx):
    size = llama_cpp.llama_state_seq_get_size(ctx, 0)
    found = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(ctx, found, size, 0) == size
    return found


def fill(ctx):
    """Use every cell and return the logits on the way."""
    some = tokens(N_CTX)
    pieces = (0, 300), (300, 301), (301, 900), (900, N_CTX)
    return np.concatenate([step(ctx, some[start:end], start) for start, end in pieces])


def test_a_new_contexts_cells_are_known_before_anything_is_evaluated(opened, cells, settings):
    with opened(**settings):
        memory = cells()
        assert memory.n == N_CTX
        assert memory.touched_bytes == memory.n_bytes > 0
        assert memory.release()
        assert memory.touched_bytes == 0


@pytest.mark.parametrize("flash_attn_type", [OFF, ON])
def test_memory_is_really_given_back(opened, cells, flash_attn_type):
    with opened(n_ctx=MANY, flash_attn_type=flash_attn_type):
        memory, before = cells(), resident_bytes()
        assert memory.n_bytes >= 32 * MIB
        assert memory.release()
        assert before - resident_bytes() >= 0.9 * memory.n_bytes


def test_cells_take_memory_again_as_graphs_reach_them(opened, cells):
    with opened(n_ctx=N_CTX, flash_attn_type=ON) as ctx:
        memory = cells()
        each = memory.n_bytes // memory.n
        assert memory.release()
        seen = []
        for start in range(0, N_CTX, 128):
            assert decode(ctx, tokens(128), start) == 0
            seen.append(memory.touched_bytes)
        assert seen == sorted(seen)
        assert seen[0] >= 256 * each  # llama.cpp's step
        assert seen[-1] == memory.n_bytes
        empty(ctx)
        assert memory.touched_bytes == memory.n_bytes  # empty, but not given back
        assert memory.release()
        assert memory.touched_bytes == 0


def test_positions_that_move_touch_all_cells(opened, cells):
    with opened(n_ctx=MANY) as ctx:
        memory, sequences = cells(), llama_cpp.llama_get_memory(ctx)
        assert memory.release()
        assert decode(ctx, tokens(64), 0) == 0
        assert memory.touched_bytes < memory.n_bytes
        llama_cpp.llama_memory_seq_rm(sequences, 0, 0, 8)
        llama_cpp.llama_memory_seq_add(sequences, 0, 8, -1, -8)
        assert decode(ctx, tokens(1), 56) == 0
        assert memory.touched_bytes == memory.n_bytes


@pytest.mark.slow
def test_answers_are_vanillas_to_the_bit_with_every_cell_in_use(opened, cells, family, settings):
    with loaded(family("llama")) as model, created(model, **settings) as ctx:
        expected = fill(ctx)
    with opened(**settings) as ctx:
        assert cells().release()
        assert np.array_equal(fill(ctx), expected)
        empty(ctx)
        assert cells().release()
        assert np.array_equal(fill(ctx), expected)


def test_a_state_that_is_loaded_into_released_cells_goes_on_as_ever(opened, cells, settings):
    some = tokens(200)
    with opened(**settings) as ctx:
        step(ctx, some, 0)
        saved = state(ctx)
        expected = step(ctx, some[:20], 200)
        empty(ctx)
        assert cells().release()
        assert llama_cpp.llama_state_seq_set_data(ctx, saved, len(saved), 0) == len(saved)
        assert bytes(state(ctx)) == bytes(saved)
        assert np.array_equal(step(ctx, some[:20], 200), expected)


def test_knowing_costs_no_graph_anything(opened, cells, plugin):
    with opened(n_ctx=N_CTX) as ctx:
        cells().release()
        step(ctx, tokens(20), 0)
        stats = plugin.contexts[0].stats()
        assert stats["passed"] == stats["graphs"] > 0
        assert stats["taps"] == 0


def test_two_caches_are_left_alone(family):
    plugin = Claimer()
    with (
        native(plugin=plugin),
        loaded(family("gemma3")) as model,
        created(model, n_ctx=256, swa_full=False) as ctx,
    ):
        memory = plugin.contexts[0].cells()
        expected = step(ctx, tokens(60), 0)
        assert (memory.n, memory.n_bytes, memory.touched_bytes) == (0, 0, 0)
        assert not memory.release()
        empty(ctx)
        assert np.array_equal(step(ctx, tokens(60), 0), expected)


def test_a_freed_context_has_no_memory(opened, cells):
    with opened(n_ctx=N_CTX):
        memory = cells()
    with pytest.raises(ReferenceError):
        memory.release()
    with pytest.raises(ReferenceError):
        _ = memory.touched_bytes
