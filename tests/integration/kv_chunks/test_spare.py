"""Spare cells use the memory that chunks leave over, and shrink when chunks need it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama
from soak import scale
from stored_chunks import encoder
from switching import ask

from llmaas_hooks import KVRestored, hookimpl
from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.kv_chunks.parking.cell_budget import ParkedCellBudget
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.model.cell_sizes import token_bytes

N_CTX, STEP = 256, 256
ENGINE = {"n_ctx": N_CTX, "flash_attn": True}
N_STATIC = 6 * STEP
N_SPARE = 32 * STEP  # 32 MiB, so much that malloc takes it from the system and not from used memory
CHUNK = KVGeometry(1, False, 1, 1, (4096,), (4096,))
CHUNK_BYTES = 34 * 4096
RNG = np.random.default_rng(4)
PROMPTS = [[1, *RNG.integers(300, 4000, n).tolist()] for n in (150, 120, 180, 90, 200, 140)]


class Spares:
    """Plugin that parks contexts; only the chunks of its store are real.

    Attributes:
        store: Store of its engine.
        parking: Parked contexts of its engine.
        spare: Spare cells of its engine.
        memory: Memory of the engine's cells.
        collapsed: For each request, whether the cells had to be given back.
    """

    def __init__(self, n_spare, ram_bytes, *, is_native=True):
        self.n_spare = n_spare
        self.store = ChunkStore(Budget(ram_bytes), None)
        self.parking = self.spare = self.memory = None
        self.collapsed = []
        self._roots = (i.to_bytes(32, "little") for i in itertools.count(1))
        if not is_native:
            self.llmaas_native_context = None

    def use(self, n_chunks, name=None):
        """Put ``n_chunks`` chunks as some app, or as many as fit."""
        ids = chain(next(self._roots), np.arange(16 * n_chunks, dtype=np.int32))
        for i, one in enumerate(ids):
            if not self.store.put(one, CHUNK_BYTES, encoder(CHUNK, one), is_first=i == 0):
                break
        self.store.touch(ids)
        if name is not None:
            self.store.set_head(name, ids)

    @hookimpl
    def llmaas_context_create(self, create):
        create.params.n_ctx += self.n_spare
        create.params.n_seq_max, create.params.kv_unified = PARKED_SEQUENCES.stop, True

    @hookimpl
    def llmaas_native_context(self, context):
        self.memory = context.cells()
        assert self.memory.release()

    @hookimpl
    def llmaas_kv_restore(self, request):
        engine = request.engine
        if self.spare is None:
            self.parking = ParkedContexts(engine)
            each = token_bytes(engine.model, engine.llama.context_params)
            self.spare = ParkedCellBudget(engine, self.parking, self.store.space, self.memory, each)
        resident = engine.resident_tokens()[: engine.n_explained]
        self.collapsed.append(self.spare.balance(len(resident), len(request.tokens)))
        self.check_budget()
        if self.collapsed[-1]:
            resident = resident[:0]
        taken = self.parking.switch(request.tokens, resident)
        if taken is None:
            return KVRestored(0, 0) if self.collapsed[-1] else None
        return KVRestored(taken.n_tokens, taken.n_tokens)

    def lent(self):
        return self.store.stats()["lent_bytes"]

    def check_budget(self):
        """Assert that all memory beyond the app's own cells is in the RAM budget."""
        stats = self.store.stats()
        used = stats["ram_bytes"] + stats["buffer_bytes"]
        assert used + stats["lent_bytes"] <= stats["ram_budget_bytes"]
        if self.memory is not None:
            assert self.memory.touched_bytes <= self.app_bytes() + stats["lent_bytes"]

    def app_bytes(self):
        return self.memory.n_bytes // self.memory.n * N_CTX


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose cells take enough memory."""
    return packaged_model


@pytest.fixture
def make(make):
    return functools.partial(make, **ENGINE)


@pytest.fixture
def each(make):
    """Return the bytes of a cell."""
    llama = make()
    return token_bytes(llama.model, llama.context_params)


@pytest.fixture
def spares(patched):
    def start(*args, **kwargs):
        plugin = Spares(*args, **kwargs)
        patched(spares=plugin)
        return plugin

    return start


@pytest.fixture(scope="module")
def vanilla(reference_model):
    """Return the first token and logits of every prompt, each evaluated alone."""
    settings = ENGINE | {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    expected = []
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        for prompt in PROMPTS:
            llama.reset()
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
            expected.append(ask(llama, prompt, 1))
    return expected


def check_answers(llama, expected, indices):
    """Compare with vanilla: equal tokens, and logits as close as other cell places allow."""
    for i in indices:
        found = ask(llama, PROMPTS[i], 1)
        assert found[0] == expected[i][0]
        assert np.abs(found[1] - expected[i][1]).max() < 0.2


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_what_a_cell_takes_is_known_before_there_is_one(make, spares, kind):
    q8_0 = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}
    plugin = spares(N_SPARE, 1 << 20)
    llama = make(**(q8_0 if kind == "q8_0" else {}))
    each = plugin.memory.n_bytes // plugin.memory.n
    assert token_bytes(llama.model, llama.context_params) == each


def test_few_contexts_stay_in_cells(make, spares, each, vanilla):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    check_answers(llama, vanilla, [0, 1, 2, 0, 1, 2])
    assert not any(plugin.collapsed)
    assert plugin.parking.stats()["takes"] == 3
    assert 0 < plugin.lent() < plugin.n_spare * each  # the cells' actual need, not the maximum
    plugin.check_budget()


def test_chunks_take_the_memory_back(make, spares, each, vanilla):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    check_answers(llama, vanilla, [0, 1, 2, 3])
    before, lent = plugin.memory.touched_bytes, plugin.lent()
    n_chunks = (16 * STEP * each - lent) // CHUNK_BYTES
    plugin.use(n_chunks)  # fills the rest of the RAM tier
    check_answers(llama, vanilla, [0])
    assert plugin.collapsed == [False] * 4 + [True]
    assert plugin.parking.n_cells == 0
    assert plugin.lent() == 0
    assert plugin.memory.touched_bytes < before
    check_answers(llama, vanilla, [1, 2, 0, 1])
    assert not any(plugin.collapsed[5:])  # fewer contexts are parked from now on
    plugin.check_budget()
    assert plugin.spare.stats()["collapses"] == 1
    assert plugin.store.stats()["chunks"] == n_chunks  # no chunk was evicted for it


def test_the_whole_context_can_be_used_after_cells_were_given_back(make, spares, each, vanilla):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    check_answers(llama, vanilla, [0, 1, 2, 3])
    plugin.use((16 * STEP * each - plugin.lent()) // CHUNK_BYTES)
    long = (PROMPTS[4] + PROMPTS[5])[: N_CTX - 6]
    found, rows = ask(llama, long, 6)
    assert plugin.collapsed[-1]
    plain = make()
    expected, expected_rows = ask(plain, long, 6)
    assert found == expected
    assert np.array_equal(rows, expected_rows)  # the cells lie as in a new context


def test_without_memory_for_any_cell_nothing_is_parked(make, spares, each, vanilla):
    plugin = spares(N_SPARE, 16 * STEP * each)
    plugin.use(16 * STEP * each // CHUNK_BYTES)
    llama = make()
    check_answers(llama, vanilla, [0, 1, 2, 0, 1, 2])
    assert not any(plugin.collapsed)
    assert plugin.parking.stats()["parks"] == 0
    assert plugin.lent() == 0


def test_cells_that_cannot_be_given_back_take_all_their_memory_at_once(make, spares, each, vanilla):
    plugin = spares(N_STATIC, 16 * STEP * each, is_native=False)
    llama = make()
    check_answers(llama, vanilla, [0, 1, 2, 0])
    assert plugin.lent() == plugin.n_spare * each
    assert plugin.parking.stats()["takes"] == 1
    plugin.use(9 * STEP * each // CHUNK_BYTES)
    assert plugin.lent() == plugin.n_spare * each
    check_answers(llama, vanilla, [1, 2])
    assert not any(plugin.collapsed)


class Kept:
    """Memory that the system does not take back, although it once did."""

    def __init__(self, memory):
        self._memory = memory
        self.n, self.n_bytes = memory.n, memory.n_bytes

    @property
    def touched_bytes(self):
        return self._memory.touched_bytes

    def release(self):
        return False


def test_cells_that_the_system_keeps_after_all_count_as_used(make, spares, each, vanilla, caplog):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    plugin.memory = Kept(plugin.memory)
    check_answers(llama, vanilla, [0, 1, 2, 3])
    plugin.use((16 * STEP * each - plugin.lent()) // CHUNK_BYTES)
    check_answers(llama, vanilla, [0])
    assert plugin.collapsed[-1]
    assert "cannot release the memory of spare cells" in caplog.text
    stats = plugin.store.stats()
    assert stats["lent_bytes"] == stats["ram_budget_bytes"] - stats["ram_bytes"] > 0
    check_answers(llama, vanilla, [1, 2, 0, 1])
    assert not any(plugin.collapsed[5:])
    assert plugin.parking.stats()["takes"] == 2


def test_an_app_that_clears_its_cells_does_not_touch_the_others(make, spares, each):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    before = plugin.memory.touched_bytes
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
    ask(llama, PROMPTS[0], 1)
    assert before == 0
    assert plugin.memory.touched_bytes <= N_CTX * each


def test_what_an_engine_was_lent_comes_back_with_its_end(make, spares, each, vanilla):
    plugin = spares(N_SPARE, 16 * STEP * each)
    llama = make()
    check_answers(llama, vanilla, [0, 1])
    assert plugin.lent() > 0
    gone = weakref.ref(plugin.spare)
    plugin.spare = None
    assert gone() is None
    assert plugin.lent() == 0


@pytest.mark.slow
@pytest.mark.parametrize("flash_attn", [True, False])
def test_whatever_is_asked_chunks_and_cells_share_one_budget(
    make, spares, each, vanilla, flash_attn
):
    """Without flash attention values are transposed: few cells touch the pages of many."""
    rng = np.random.default_rng(0)
    plugin = spares(N_SPARE, 7 * STEP * each)
    llama = make(flash_attn=flash_attn)
    for _ in range(scale(40, 1000)):
        event, name = rng.random(), f"context {rng.integers(4)}"
        if event < 0.3:
            plugin.use(int(rng.integers(1, 30)), name)
        elif event < 0.5:
            plugin.store.evict_context(name)
        check_answers(llama, vanilla, [int(rng.integers(len(PROMPTS)))])
        assert plugin.parking.n_cells <= plugin.parking.limit
    assert plugin.parking.stats()["takes"] > 0
    assert any(plugin.collapsed)
