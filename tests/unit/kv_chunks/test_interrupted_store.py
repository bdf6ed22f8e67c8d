"""Ctrl-C, or a handler that ends the suite, while the main thread works on a store."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from interrupting import Interruption, interruptions
from kv_stores import BUDGET, GEOM, ROOT, A, B, load, on_disk, open_store, save, write_store
from page_stores import text
from stored_chunks import payload, put

from llmaas_hooks import StoreError
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks import plugin as plugin_module
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.kv_chunks.plugin import KVChunks
from llmaas_plugins.kv_chunks.store import (
    chunk_store,
    chunk_writer,
    disk_store,
    disk_tier,
    index,
    ram_space,
    ram_tier,
    residency,
)
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.transfer import staging as staging_module
from llmaas_plugins.kv_chunks.transfer.staging import Staging

ONLY_A = chain(ROOT, A)[2:]
LATE = np.arange(9000, 9064, dtype=np.int32)
STEP = 3
"""Every third line is interrupted where there are hundreds."""


def left_of_a(directory):
    data = on_disk(directory)
    return [one for one in ONLY_A if one.tokens in data or payload(GEOM, one)[128:] in data]


def assert_adds_up(store):
    """Assert that no pin, RAM or disk space is left of an interrupted operation."""
    state = store._residency
    assert all(chunk.pins == 0 for chunk in state.tree)
    assert not state._pins
    assert not state.ram._pending
    in_ram = sum(page_round(chunk.size) for chunk in state.tree if chunk.ram != -1)
    assert state.ram.used_bytes == in_ram + store.space.buffer_bytes
    assert state.ram.lent == sum(state._lent.values())
    if state.disk is not None:
        on = sum(page_round(chunk.size) for chunk in state.tree if chunk.disk != -1)
        assert state.disk.used_bytes == on


def send_ctrl_c_in(monkeypatch, one, name, then=bool):
    """Send Ctrl-C to the main thread once it is in ``one.name()``, and call ``then`` later."""
    is_called, method = threading.Event(), getattr(one, name)

    def called():
        is_called.set()
        return method()

    def send():
        is_called.wait(20)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.15)
        then()

    monkeypatch.setattr(one, name, called)
    threading.Thread(target=send).start()


# -- deletion -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deletion_after_an_interrupted_one_is_complete(tmp_path):
    parts = chunk_store, chunk_writer, disk_tier, index
    for i, interruption in enumerate(interruptions(*parts, step=STEP)):
        directory = write_store(tmp_path / str(i))
        store = open_store(directory)
        with interruption:
            store.evict_context("a")
        store.evict_context("a")
        assert left_of_a(directory) == [], interruption.where
        save(store, LATE, "late")
        store.close()
        store = open_store(directory)
        assert (load(store, B), load(store, LATE)) == (len(B), len(LATE)), interruption.where
        assert set(store.tree.contexts()) == {"b", "late"}
        store.close()


def test_a_handler_may_close_the_store_in_a_deletion(tmp_path):
    for i in itertools.count():
        directory = write_store(tmp_path / str(i))
        store = open_store(directory)
        interruption = Interruption(
            1 + STEP * i, chunk_store, chunk_writer, handler=lambda *_, one=store: one.close()
        )
        with interruption, contextlib.suppress(StoreError):
            store.evict_context("a")
        store.close()
        store = open_store(directory)
        store.evict_context("a")
        assert left_of_a(directory) == [], interruption.where
        store.close()
        if not interruption.came:
            break
    assert i > 5


def test_a_deletion_that_finds_the_store_closed_is_reported(kv):
    store = open_store(kv)
    writer = store._writer
    writer.close()
    with pytest.raises(StoreError, match=r"was closed before .* delete again"):
        store.evict_context("a")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_changes_that_no_commit_took_stay(kv, monkeypatch, error):
    store = open_store(kv)

    def apply(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(index.ChunkIndex, "apply", apply)
        with pytest.raises(error):
            store.evict_context("a")
    store.evict_context("a")
    assert left_of_a(kv) == []
    store.close()


def test_no_transaction_stays_open(tmp_path):
    update = index.IndexUpdate(removed=[b"x"], heads={}, writes={1: 2}, erases=True)
    one = index.ChunkIndex(tmp_path / "index.sqlite", bytes(index.STORE_ID_BYTES))
    for interruption in interruptions(index):
        with interruption:
            one.apply(update)
        assert not one._db.in_transaction, interruption.where
    one.apply(update)
    one.close()


# -- writing, space -----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_flush_leaves_nothing_and_the_next_one_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_writer, "_BATCH_CHUNKS", 2)
    for i, interruption in enumerate(interruptions(chunk_writer, index, step=2 * STEP + 1)):
        store = open_store(tmp_path / str(i))
        save(store, A, "a")
        with interruption:
            store.flush()
        assert_adds_up(store)
        store.flush()
        assert not store._residency.dirty
        assert_adds_up(store)
        store.close()
        store = open_store(tmp_path / str(i))
        assert load(store, A) == len(A), interruption.where
        store.close()


def test_ctrl_c_ends_a_flush_after_the_batch(kv, monkeypatch, ctrl_c):
    monkeypatch.setattr(chunk_writer, "_BATCH_CHUNKS", 1)
    store, write = open_store(kv), chunk_writer._native.store_write

    def interrupted(*args):
        write(*args)
        signal.raise_signal(signal.SIGINT)

    save(store, LATE)
    with monkeypatch.context() as patched:
        patched.setattr(chunk_writer._native, "store_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    assert len(store._residency.dirty) == 3
    assert_adds_up(store)
    store.close()
    store = open_store(kv)
    assert load(store, LATE) == len(LATE)
    store.close()


@pytest.mark.slow
def test_chunks_that_do_not_fit_are_lost_after_an_interrupted_flush_too(monkeypatch, open_store):
    monkeypatch.setattr(chunk_writer, "_BATCH_CHUNKS", 1)
    for interruption in interruptions(chunk_writer, step=STEP):
        store = open_store(ram=20, disk=4)  # three chunks and a header
        put(store, GEOM, chain(ROOT, text((0, 80))), "mine")
        with interruption:
            store.flush()
        store.flush()
        assert len(store.tree) == 3, interruption.where
        assert not store._writer._lost
        assert_adds_up(store)
        store.evict_context("mine")


def test_ctrl_c_ends_the_wait_for_another_thread(kv, monkeypatch, ctrl_c):
    store = open_store(kv)
    send_ctrl_c_in(monkeypatch, store._writer, "erase_freed")
    with store._writer._flush_lock, pytest.raises(KeyboardInterrupt):
        store.evict_context("a")
    store.evict_context("a")
    assert left_of_a(kv) == []
    store.close()


def test_interrupted_changes_of_the_ram_tier_add_up(open_store):
    parts = residency, ram_tier, ram_space, chunk_store
    for interruption in interruptions(*parts, step=STEP):
        store = open_store(ram=8)
        with interruption:
            put(store, GEOM, chain(ROOT, text((0, 80))), "mine")
            store.space.lend("cells", 6 * PAGE)
            store.evict_context("mine")
            store.space.lend("cells", 2 * PAGE)
        assert_adds_up(store)


def test_interrupted_buffers_are_not_lost(open_store):
    for interruption in interruptions(staging_module, ram_space, ram_tier):
        store = open_store(ram=4096)
        staging = Staging(store.space)
        with interruption:
            staging.segment_chunks(GEOM)
        assert store.space.buffer_bytes == staging.all_buffers.nbytes, interruption.where
        assert_adds_up(store)


# -- opening, closing ---------------------------------------------------------------------------


def configured(directory):
    return KVChunks(KVChunksConfig(store=directory, ram_budget=BUDGET, disk_budget=BUDGET))


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise ``KeyboardInterrupt`` here, also where the tests run in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def n_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_interrupted_opening_leaves_no_file_open(kv):
    before = n_open_files()
    for interruption in interruptions(plugin_module, disk_store, chunk_store, step=STEP):
        plugin = configured(kv)
        with interruption:
            plugin._open()
        plugin.llmaas_shutdown()
        assert n_open_files() == before, interruption.where
    open_store(kv).close()


def slow_disk(monkeypatch):
    """Let each write wait; return an event that a write sets, and the one that it waits for."""
    is_writing, may_write = threading.Event(), threading.Event()
    write = chunk_writer._native.store_write

    def slow(*args):
        is_writing.set()
        may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(chunk_writer._native, "store_write", slow)
    return is_writing, may_write


def test_ctrl_c_while_writes_end_closes_the_store(kv, ctrl_c, monkeypatch):
    """The main thread waits for a slow disk, as a suite's end does."""
    plugin = configured(kv)
    save(plugin._open(), LATE, "late")
    is_writing, may_write = slow_disk(monkeypatch)
    plugin._workers.write.submit(plugin._flush)
    plugin._workers.load.submit(int)  # makes a thread that must end, too
    is_writing.wait(20)
    send_ctrl_c_in(monkeypatch, plugin._workers, "close", may_write.set)
    with pytest.raises(KeyboardInterrupt):
        plugin.llmaas_shutdown()
    for pool in (plugin._workers.load, plugin._workers.write):
        pool.shutdown()  # returns at once if the pool is to end
        assert not any(thread.is_alive() for thread in pool._threads)
    store = open_store(kv)
    assert (load(store, A), load(store, LATE)) == (len(A), len(LATE))
    store.close()


def test_a_flush_in_another_thread_ends_after_its_batch_when_the_store_is_closed(
    kv, ctrl_c, monkeypatch
):
    monkeypatch.setattr(chunk_writer, "_BATCH_CHUNKS", 1)
    store = open_store(kv)
    save(store, LATE, "late")
    is_writing, may_write = slow_disk(monkeypatch)
    flushes = threading.Thread(target=store.flush)
    flushes.start()
    is_writing.wait(20)
    send_ctrl_c_in(monkeypatch, store._writer, "flush", may_write.set)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    flushes.join(20)
    assert not flushes.is_alive()
    assert store.stats()["io_errors"] == 0
    store = ChunkStore(Budget(BUDGET), disk_store.DiskStore(kv, BUDGET))
    assert load(store, A) == len(A)
    store.close()
