"""Restores into the engine's cells that damage or failures stop half-way."""

from __future__ import annotations

import signal
import threading
import time

import llama_cpp
import numpy as np
import pytest
from damages import flip
from landing import (
    FOREIGN,
    PROMPT,
    assert_alike,
    keep,
    staged,
)
from restoring import (
    engine_of,
    leave_ram,
    lose,
    path_of,
    plugin_of,
    position_after,
    restore,
    store_of,
)
from switching import ask

from llmaas_hooks import PluginError
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES, SCRATCH_SEQUENCE
from llmaas_plugins.kv_chunks.transfer import chunk_load
from llmaas_plugins.kv_chunks.transfer.cell_loader import CellLoader

LAST = PARKED_SEQUENCES[-1]


# -- what is not sound -----------------------------------------------------------------------------


def spoil(suite, llama, i):
    """Leave the prompt's chunks on disk only, and flip a bit of one."""
    path = path_of(suite, llama, PROMPT)
    leave_ram(suite, llama, PROMPT)
    at = store_of(suite)._residency.disk.file_offset(path[i].disk) + path[i].size // 2
    flip(store_of(suite)._writer.directory / "chunks.slab", at)


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
@pytest.mark.parametrize("is_direct", [True, False], ids=["to cells", "in segments"])
def test_ctrl_c_waits_until_chunks_are_in_place(make_one, stored, monkeypatch, is_direct):
    """Between threads and inside of reads, it would leave locks locked and chunks pinned."""
    active, came = stored(), []
    store = store_of(active)
    fetch, caller, has_come = store.reader.fetch, threading.get_ident(), threading.Event()

    def interrupted(chunks, **options):
        if threading.get_ident() != caller:
            has_come.wait(60)  # so that these threads leave a job to the caller
        elif not came:
            came.append(True)
            signal.raise_signal(signal.SIGINT)
            came.append(len(chunks))  # it did not end this call
            has_come.set()
        return fetch(chunks, **options)

    with make_one() as llama:
        with monkeypatch.context() as patch:
            patch.setattr(store.reader, "fetch", interrupted)
            if not is_direct:
                patch.setattr(CellLoader, "_load_directly", lambda *_: 0)
            with pytest.raises(KeyboardInterrupt):
                ask(llama, PROMPT, 1)
        assert len(came) == 2
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
    submit, left = pool.submit, [3]

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
