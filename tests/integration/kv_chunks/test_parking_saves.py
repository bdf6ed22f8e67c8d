"""Contexts beside parked ones are saved too, although their cells lie in any order.

The engine puts new tokens into the first free cells. When a parked context is dropped, these may
be cells before those of the context in use.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest
from switching import ask

from llmaas_hooks import hookimpl
from llmaas_plugins import _native
from llmaas_plugins.kv_chunks.eligibility import spare_cells
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES

RNG = np.random.default_rng(7)
LEFT = [1, *RNG.integers(300, 4000, 39).tolist()]
BESIDE = [2, *RNG.integers(300, 4000, 39).tolist()]
GROWN = [*BESIDE, *RNG.integers(300, 4000, 30).tolist()]
SETTINGS = {"V transposed": {}, "flash attention": {"flash_attn": True}}


class Spare:
    """Plugin that gives every context spare cells, after ``kv_chunks`` has set its own number."""

    @hookimpl(trylast=True)
    def llmaas_context_create(self, create):
        params = create.params
        params.n_ctx += spare_cells(create, 256)
        params.n_seq_max, params.kv_unified = PARKED_SEQUENCES.stop, True


@pytest.fixture(params=SETTINGS)
def mixed(request, make, suite):
    """Return an engine whose context grew into earlier cells, left by a dropped context."""
    active = suite()
    active.hooks.register("spare", Spare())
    llama = make(**SETTINGS[request.param])
    ask(llama, LEFT, 1)
    ask(llama, BESIDE, 1)
    transfer = transfer_of(active)
    assert transfer._parking.n_cells == len(LEFT)
    transfer._parking.clear_later()
    ask(llama, GROWN, 1)
    active.settle()
    return active, llama


def transfer_of(suite):
    (transfer,) = suite.plugin("kv_chunks")._transfers.values()
    return transfer


def cells(llama):
    """Return sequence 0 as the engine lists it."""
    size = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = np.empty(size, np.uint8)
    pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, pointer, size, 0) == size
    return blob


def by_position(blob):
    """Return all rows of each cell, in order of position."""
    geometry, n = _native.blob_probe(blob)
    order = np.argsort(_native.blob_positions(blob))
    at, planes = 16 + 12 * n + 8, []
    for is_v, rows in ((False, geometry.k_row), (True, geometry.v_row)):
        for row in rows:
            at += 12
            data = blob[at : at + n * row].view(np.uint16)
            by_cell = data.reshape(-1, n).T if is_v and geometry.v_trans else data.reshape(n, -1)
            planes.append(by_cell[order])
            at += n * row
    assert at == len(blob)
    return np.concatenate(planes, axis=1)


def test_what_is_saved_is_what_the_cells_hold(mixed, make, suite, request):
    active, llama = mixed
    blob = cells(llama)
    assert _native.blob_positions(blob) == [*range(len(BESIDE), len(GROWN)), *range(len(BESIDE))]
    active = suite()  # another life of the process
    again = make(**SETTINGS[request.node.callspec.params["mixed"]])
    ask(again, [*GROWN, 500], 1)
    assert active.status()["plugins"]["kv_chunks"]["restored_tokens"] == len(GROWN)
    assert np.array_equal(by_position(cells(again))[: len(GROWN)], by_position(blob))


def test_a_range_of_a_context_is_read_in_the_engine_s_order(mixed):
    """Sorting is necessary because of the new part since the last save."""
    active, llama = mixed
    transfer = transfer_of(active)
    geometry = transfer._layout.geometry
    blob = np.zeros(_native.blob_size(geometry, 32), np.uint8)
    assert transfer._cells.read(32, 64, blob) == blob.nbytes
    assert _native.blob_positions(blob) == [*range(40, 64), *range(32, 40)]
    expected = by_position(cells(llama))[32:64]
    _native.blob_sort(geometry, blob, 32)
    assert _native.blob_positions(blob) == [*range(32, 64)]
    assert np.array_equal(by_position(blob), expected)


@pytest.mark.parametrize("is_direct", [True, False])
def test_chunks_after_a_context_that_came_back_leave_its_label(make, suite, is_direct):
    """They replace its last cells only, from the last whole chunk on."""
    active = suite()
    active.hooks.register("spare", Spare())
    llama, long = make(), [*GROWN, *RNG.integers(300, 4000, 130).tolist()]
    ask(llama, long, 1)
    transfer = transfer_of(active)
    if not is_direct:
        transfer._loader._memory = None
    ask(llama, LEFT, 1)
    transfer._parking.clear_later()
    for prompt in ([3, *LEFT[1:]], long[:100], [4, *LEFT[1:]], long):
        ask(llama, prompt, 1)
    (engine,) = active.plugin("kv_chunks")._transfers
    stats = active.status()["plugins"]["kv_chunks"]
    assert (stats["takes"], stats["restored_tokens"]) == (1, 100 + len(long))
    memory = llama_cpp.llama_get_memory(llama.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, engine.parked.current) == 95
