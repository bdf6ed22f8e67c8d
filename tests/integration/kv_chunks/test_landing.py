"""Stored chunks decoded straight into the engine's cells, against a restore through buffers."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama
from restoring import (
    cells,
    engine_of,
    leave_ram,
    lose,
    path_of,
    plugin_of,
    position_after,
    restore,
    store_of,
    transfer_of,
)
from switching import ask

from llmaas_hooks import PluginError
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES, SCRATCH_SEQUENCE
from llmaas_plugins.kv_chunks.transfer import chunk_load, direct_load
from llmaas_plugins.kv_chunks.transfer.cell_loader import CellLoader

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
CASES = {
    "transposed": {},
    "flash": {"flash_attn": True},
    "q8_0": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
}
RNG = np.random.default_rng(7)
PROMPT = [1, *RNG.integers(300, 4000, 199).tolist()]  # 12 chunks and a half
FOREIGN = [1, *RNG.integers(300, 4000, 40).tolist()]
MORE = RNG.integers(300, 4000, 20).tolist()
TIERS = {"RAM": [], "disk": range(13), "mixed": [0, 3, 4, 5, 9, 12]}
"""Chunks that only the disk has."""
LAST = PARKED_SEQUENCES[-1]


def opener(path, **settings):
    """Return a function that makes a new engine each time."""
    settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | settings
    return lambda: contextlib.closing(Llama(str(path), **settings))


@pytest.fixture(params=CASES)
def make(request, reference_model):
    return opener(reference_model, **CASES[request.param])


@pytest.fixture
def make_one(reference_model):
    return opener(reference_model)


@pytest.fixture
def stored(suite, make_one):
    """Return a function that activates and stores the prompt's chunks."""

    def store(make=make_one, **table):
        active = suite(**{"codec": "tolerance"} | table)
        with make() as llama:
            ask(llama, PROMPT, 1)
            ask(llama, FOREIGN, 1)
            active.settle()
        return active

    return store


@pytest.fixture
def ways(monkeypatch):
    """Record each restore's tokens: those sent straight to their cells, and through buffers."""
    found = []

    def watch(name, n_tokens):
        original = getattr(CellLoader, name)

        def call(self, *args):
            result = original(self, *args)
            found.append((name, n_tokens(result)))
            return result

        monkeypatch.setattr(CellLoader, name, call)

    watch("_load_directly", int)
    watch("_load_in_segments", lambda result: result[1])
    return found


@pytest.fixture
def small_pieces(monkeypatch):
    """Give the threads one chunk at a time, as if chunks were large."""
    monkeypatch.setattr(
        direct_load, "split_records", lambda chunks, *_: chunk_load.split_records(chunks, 1)
    )


def staged(suite, llama, prompt=PROMPT):
    """Restore through the buffers."""
    transfer_of(suite, llama)._loader._memory = None
    return restore(suite, llama, prompt)


def keep(suite, llama, n):
    """Fill the engine with ``n`` tokens of the prompt and other tokens after them."""
    restore(suite, llama, PROMPT[:n])
    llama.eval(FOREIGN[1:])


def go_on(llama):
    """Return the logits after the engine's tokens; nothing is saved."""
    llama.eval(MORE)
    row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(row, shape=(llama.n_vocab(),)).copy()


def assert_alike(suite, one, other):
    """Both engines continue with the same logits and the same attention to chunks."""
    assert np.array_equal(go_on(one), go_on(other))
    n = len(PROMPT) + len(MORE)
    looks = [np.array(transfer_of(suite, llama)._attention.take(n)) for llama in (one, other)]
    assert looks[0].all()
    assert np.array_equal(*looks)


# -- the same cells --------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_cells_are_those_that_come_through_the_buffers(make_one, stored, ways, tier):
    active = stored()
    with make_one() as one, make_one() as other:
        leave_ram(active, one, PROMPT, TIERS[tier])
        restored, found = restore(active, one, PROMPT)
        assert ways == [("_load_directly", len(PROMPT))]
        assert (restored.n_tokens, restored.n_loaded) == (len(PROMPT), len(PROMPT))
        leave_ram(active, one, PROMPT, TIERS[tier])
        _, expected = staged(active, other)
        assert ways[1:] == [("_load_directly", 0), ("_load_in_segments", len(PROMPT))]
        assert np.array_equal(found, expected)
        assert_alike(active, one, other)


@pytest.mark.usefixtures("small_pieces")
def test_threads_bring_them_all_to_their_places(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        _, expected = staged(active, other)
        for on_disk in TIERS.values():
            ways.clear()
            leave_ram(active, one, PROMPT, on_disk)
            _, found = restore(active, one, PROMPT)
            assert ways == [("_load_directly", len(PROMPT))]
            assert np.array_equal(found, expected)
            engine_of(active, one).drop_resident()


def test_behind_cells_that_stayed(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        _, expected = staged(active, other)
        for n_kept in (5, 40, 64, 180):
            keep(active, one, n_kept)
            ways.clear()
            restored, found = restore(active, one, PROMPT)
            assert ways == [("_load_directly", len(PROMPT) - n_kept // 16 * 16)]
            assert restored.n_tokens == len(PROMPT)
            assert np.array_equal(found, expected)
            assert position_after(one, SCRATCH_SEQUENCE) == 0
            engine_of(active, one).drop_resident()


def test_the_last_chunk_may_only_begin_like_the_prompt(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        for n in (5, 16, 17, 173):
            ways.clear()
            restored, found = restore(active, one, PROMPT[:n])
            assert ways == [("_load_directly", n)]
            assert (restored.n_tokens, restored.n_loaded) == (n, n)
            assert position_after(one) == n
            assert np.array_equal(found, staged(active, other, PROMPT[:n])[1])
            for llama in (one, other):
                engine_of(active, llama).drop_resident()


def test_lossless_cells_are_vanillas(make, stored, ways):
    with make() as llama:
        llama.eval(PROMPT)
        expected = cells(llama)
    active = stored(make, codec="lossless", parked_tokens=256)
    with make() as llama:
        restored, found = restore(active, llama, PROMPT)
        assert ways == [("_load_directly", restored.n_tokens)]
        assert np.array_equal(found, expected)


@pytest.mark.usefixtures("small_pieces")
def test_another_life_with_little_ram(stored, suite, make_one, ways):
    """Threads compete for the memory that chunks are read into."""
    stored()
    active = suite(codec="tolerance", ram_budget="1 MiB")
    with make_one() as one, make_one() as other:
        restored, found = restore(active, one, PROMPT)
        assert ways[0][0] == "_load_directly"
        assert ways[0][1] > 0
        assert restored.n_loaded == len(PROMPT)
        assert np.array_equal(found, staged(active, other)[1])


@pytest.mark.usefixtures("small_pieces")
def test_two_engines_at_the_same_time(stored, make_one, ways):
    active = stored()
    with make_one() as one, make_one() as other, make_one() as third:
        prompts = {one: PROMPT, other: PROMPT[:90]}
        expected = {}
        for llama, prompt in prompts.items():
            expected[llama] = staged(active, third, prompt)[1]
            engine_of(active, third).drop_resident()
        ways.clear()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(5):
                leave_ram(active, third, PROMPT)
                found = {
                    llama: pool.submit(restore, active, llama, prompt)
                    for llama, prompt in prompts.items()
                }
                for llama in prompts:
                    assert np.array_equal(found[llama].result()[1], expected[llama])
                    engine_of(active, llama).drop_resident()
        assert sorted(ways) == [("_load_directly", 90)] * 5 + [("_load_directly", len(PROMPT))] * 5


# -- what is not sound -----------------------------------------------------------------------------


def spoil(suite, llama, i):
    """Leave the prompt's chunks on disk only, and flip a bit of one."""
    path = path_of(suite, llama, PROMPT)
    leave_ram(suite, llama, PROMPT)
    at = store_of(suite)._residency.disk.file_offset(path[i].disk) + path[i].size // 2
    with (store_of(suite)._writer.directory / "chunks.slab").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("i", [0, 5, 11])
def test_what_is_sound_in_front_of_damage_stays(make_one, stored, ways, i):
    active = stored()
    with make_one() as one, make_one() as other:
        spoil(active, one, i)
        restored, found = restore(active, one, PROMPT)
        assert ways == [
            ("_load_directly", 16 * i),
            ("_load_in_segments", len(PROMPT) - 16 * (i + 1)),
        ]
        assert (restored.n_tokens, restored.n_recomputed) == (len(PROMPT), 16)
        assert store_of(active).stats()["faults"] == 1
        assert all(chunk.pins == 0 for chunk in path_of(active, one, PROMPT))
        _, expected = staged(active, other)  # the same chunk is missing
        assert np.array_equal(found, expected)
        assert_alike(active, one, other)


def test_damage_of_the_last_chunk_is_left_to_the_engine(make_one, stored, ways):
    active = stored()
    with make_one() as llama:
        spoil(active, llama, 12)
        restored, _ = restore(active, llama, PROMPT)
        assert ways == [("_load_directly", 192), ("_load_in_segments", 0)]
        assert (restored.n_tokens, restored.n_recomputed) == (192, 0)
        assert position_after(llama) == 192


def test_damage_behind_cells_that_stayed(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        for llama in (one, other):
            keep(active, llama, 40)
        spoil(active, one, 5)
        ways.clear()
        restored, found = restore(active, one, PROMPT)
        assert ways == [("_load_directly", 48), ("_load_in_segments", len(PROMPT) - 96)]
        assert restored.n_tokens == len(PROMPT)
        assert np.array_equal(found, staged(active, other)[1])


def test_where_something_has_to_be_recomputed_nothing_lands(make_one, stored, ways):
    active = stored()
    with make_one() as llama:
        lose(active, llama, PROMPT, [4])
        assert restore(active, llama, PROMPT)[0].n_tokens == len(PROMPT)
        assert ways == [("_load_directly", 0), ("_load_in_segments", len(PROMPT) - 16)]


def test_cells_between_parked_ones_are_loaded_through_the_buffers(make, stored, ways):
    active = stored(make, parked_tokens=256)
    with make() as one, make() as other:
        _, expected = staged(active, other)
        occupy(active, one, range(30, 55))
        ways.clear()
        restored, found = restore(active, one, PROMPT)
        assert ways == [("_load_directly", 0), ("_load_in_segments", len(PROMPT))]
        assert restored.n_tokens == len(PROMPT)
        assert np.array_equal(found, expected)
        assert (position_after(one, SCRATCH_SEQUENCE), position_after(one, LAST)) == (0, 55)


def occupy(suite, llama, cells):
    """Let another sequence occupy these cells of an empty engine."""
    llama.eval(FOREIGN)
    llama.eval(FOREIGN[: cells.stop - len(FOREIGN)])
    memory = llama_cpp.llama_get_memory(llama.ctx)
    with engine_of(suite, llama).lent():
        llama_cpp.llama_memory_seq_cp(memory, 0, LAST, cells.start, cells.stop)
    engine_of(suite, llama).drop_resident()


# -- failures --------------------------------------------------------------------------------------


@pytest.fixture
def under_way(monkeypatch):
    """Record the threads that write to cells now, and slow each one down."""
    writing, started = set(), threading.Event()
    original = chunk_load._native.chunks_land_at

    def slow(*args):
        writing.add(threading.get_ident())
        started.set()
        time.sleep(0.02)
        try:
            return original(*args)
        finally:
            writing.discard(threading.get_ident())

    monkeypatch.setattr(chunk_load._native, "chunks_land_at", slow)
    return writing, started


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("is_in_caller", [False, True], ids=["a loader", "the caller"])
def test_no_thread_writes_once_a_restore_has_failed(  # noqa: PLR0917
    make_one, stored, monkeypatch, under_way, error, is_in_caller
):
    active, caller = stored(), threading.get_ident()
    store, (writing, started) = store_of(active), under_way
    fetch = store.reader.fetch

    def failing(chunks, **options):
        if (threading.get_ident() == caller) == is_in_caller:
            assert started.wait(10)
            raise error("for this test")
        return fetch(chunks, **options)

    with make_one() as llama:
        with monkeypatch.context() as patch:
            patch.setattr(store.reader, "fetch", failing)
            with pytest.raises(BaseException, match="for this test"):
                ask(llama, PROMPT, 1)
            assert not writing
        assert position_after(llama) == 0
        assert all(chunk.pins == 0 for chunk in path_of(active, llama, PROMPT))
        assert restore(active, llama, PROMPT)[0].n_loaded == len(PROMPT)


@pytest.mark.usefixtures("small_pieces")
def test_a_restore_does_not_wait_for_threads_that_are_busy(make_one, stored, ways):
    active = stored()
    pool, done = plugin_of(active)._workers.load, threading.Event()
    with make_one() as llama:
        busy = [pool.submit(done.wait, 60) for _ in range(pool._max_workers)]
        assert restore(active, llama, PROMPT)[0].n_loaded == len(PROMPT)
        assert ways == [("_load_directly", len(PROMPT))]
        assert not any(job.done() for job in busy)
        done.set()


@pytest.mark.usefixtures("small_pieces")
def test_what_was_queued_for_a_restore_that_failed_never_begins(make_one, stored, under_way):
    """When a thread cannot be started, the pool still keeps its job."""
    active, (_, started) = stored(), under_way
    pool, done = plugin_of(active)._workers.load, threading.Event()
    submit, left = pool.submit, [5]

    def failing(*args):
        submit(*args)
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("can't start new thread")

    with make_one() as llama, pytest.MonkeyPatch.context() as patch:
        for _ in range(pool._max_workers):
            submit(done.wait, 60)
        patch.setattr(pool, "submit", failing)
        with pytest.raises(PluginError, match="can't start new thread"):
            ask(llama, PROMPT, 1)
        done.set()
        submit(int).result()
        assert not started.is_set()
        assert position_after(llama) == 0
