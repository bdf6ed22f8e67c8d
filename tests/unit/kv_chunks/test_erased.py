"""A deletion from a KV store leaves no byte in its folder, or the call reports why."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from damages import overwrite
from kv_stores import BUDGET, GEOM, ROOT, A, B, assert_works, load, on_disk, open_store, run, save
from reading import reader_of
from stored_chunks import payload

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins.files import sqlite_erasing, store_lock
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.kv_chunks.maintenance import snapshot
from llmaas_plugins.kv_chunks.plugin import KVChunks
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.index import ChunkIndex

LATE = np.arange(9000, 9064, dtype=np.int32)
ONLY_A, ONLY_B = chain(ROOT, A)[2:], chain(ROOT, B)[2:]


def left_of(directory, ids):
    """Return the chunks whose keys, tokens or cells are in the folder's files."""
    data = on_disk(directory)
    # the other context's chunks, and shared ones
    assert all(one.tokens in data for one in chain(ROOT, B))
    cells = [payload(GEOM, one)[128:] for one in ids]
    return [
        i
        for i, one in enumerate(ids)
        if {one.key in data, one.tokens in data, cells[i] in data} != {False}
    ]


DIE = """
import os, sys
from pathlib import Path
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.index import ChunkIndex
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.files.sqlite_erasing import Eraser

directory, where, step = Path(sys.argv[1]), *sys.argv[2:]
place, name = {
    "commit": (ChunkIndex, "apply"),
    "slab": (DiskTier, "erase"),
    "log": (Eraser, "_empty_log"),
    "gaps": (Eraser, "_fill_gaps"),
}[step]
store = ChunkStore(Budget(1 << 20), DiskStore(directory, 1 << 20))
done = getattr(place, name)

def die(*args):
    if where == "after":
        done(*args)
    os.kill(os.getpid(), 9)

setattr(place, name, die)
store.evict_context("a")
"""


@pytest.mark.parametrize("step", ["commit", "slab", "log", "gaps"])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.slow
def test_a_deletion_that_is_killed_is_finished_or_never_was(kv, where, step):
    assert run(DIE, kv, where, step).returncode == -9
    assert left_of(kv, ONLY_A) or step == "gaps" or (where, step) == ("after", "log")
    store = open_store(kv)
    if (where, step) == ("before", "commit"):
        assert load(store, A) == len(A)
        store.evict_context("a")
    assert left_of(kv, ONLY_A) == []
    assert load(store, B) == len(B)
    assert not store._writer._disk.index.is_erasing()
    store.close()


def test_who_reads_is_named_while_bytes_are_left(kv, monkeypatch):
    monkeypatch.setattr(sqlite_erasing, "PATIENCE_S", 0.1)
    store = open_store(kv)
    save(store, LATE, "late")
    store.flush()  # into the log
    late = chain(ROOT, LATE)
    with reader_of(kv / "index.sqlite") as pid:
        with pytest.raises(StoreError, match=rf"process {pid} \(.*python.*has been reading"):
            store.evict_context("late")
        assert left_of(kv, late)
        with pytest.raises(StoreError, match=f"process {pid} "):
            store.evict_context("late")
    assert store.evict_context("late") == 0  # the context is deleted except for the erasing
    assert left_of(kv, late) == []
    store.close()


def test_what_a_reader_kept_is_erased_when_the_store_is_opened(kv, monkeypatch, caplog):
    monkeypatch.setattr(sqlite_erasing, "PATIENCE_S", 0.1)
    store = open_store(kv)
    with reader_of(kv / "index.sqlite") as pid:
        with pytest.raises(StoreError, match=f"process {pid} "):
            store.evict_context("a")
        store.close()
        open_store(kv).close()  # the store is served all the same
        assert f"process {pid} " in caplog.text
    open_store(kv).close()
    assert left_of(kv, ONLY_A) == []


def test_an_index_that_was_set_aside_is_no_hiding_place(kv):
    (kv / "index.sqlite.unusable").write_bytes(ONLY_A[0].tokens)
    store = open_store(kv)
    store.evict_context("a")
    assert left_of(kv, ONLY_A) == []
    store.close()


def test_nothing_is_kept_in_a_temporary_folder(kv):
    store = open_store(kv)
    (where,) = store._writer._disk.index._db.execute("PRAGMA temp_store").fetchone()
    store.close()
    assert where == 2  # memory: sorting and VACUUM would write texts to /tmp


def test_deleted_context_is_gone_from_the_disk(kv):
    """Cells, tokens and name are gone, also from the index's log and free pages."""
    only_a, only_b = chain(ROOT, A)[2:], chain(ROOT, B)[2:]
    assert all(payload(GEOM, wanted) in on_disk(kv) for wanted in only_a)
    store = open_store(kv)
    store.evict_context("a")
    left = on_disk(kv)
    for wanted in only_a:
        assert payload(GEOM, wanted)[128:] not in left
        assert wanted.tokens not in left
        assert wanted.key not in left
    assert all(payload(GEOM, wanted) in left for wanted in only_b)
    assert load(store, B) == len(B)
    store.close()
    assert_works(kv)


def test_what_left_the_disk_before_is_erased_too(kv):
    """This covers chunks replaced by a larger one, evicted for room, or left by a crash."""
    overwrite(kv / "chunks.slab", 60 * PAGE, b"left by a flush whose process was killed")
    store = open_store(kv)
    first = np.arange(7000, 7036, dtype=np.int32)
    save(store, first, "grows")
    store.flush()
    save(store, np.arange(7000, 7064, dtype=np.int32), "grows")
    store.flush()
    partial = chain(ROOT, first)[-1]
    store.evict_context("b")
    assert b"left by a flush" not in on_disk(kv)
    assert payload(GEOM, partial)[128:] not in on_disk(kv)
    store.close()


def test_context_deleted_while_it_is_written_is_gone_too(kv, monkeypatch):
    store = open_store(kv)
    tokens = np.arange(7000, 7064, dtype=np.int32)
    save(store, tokens, "late")
    write, deleted = _native.store_write, []

    def slow_write(*args):
        thread = threading.Thread(target=lambda: deleted.append(store.evict_context("late")))
        thread.start()
        while store.tree.contexts().get("late"):
            pass
        monkeypatch.undo()
        deleted.append(thread)
        return write(*args)

    monkeypatch.setattr(_native, "store_write", slow_write)
    store.flush()
    deleted[0].join()
    assert deleted[1] > 0
    assert all(payload(GEOM, wanted)[128:] not in on_disk(kv) for wanted in chain(ROOT, tokens))
    store.close()
    assert_works(kv)


def test_erasing_that_fails_is_told_and_made_up_for(kv, monkeypatch):
    store = open_store(kv)

    def fail(*args):
        raise StoreError(5, "chunk store: erasing stopped")

    monkeypatch.setattr(_native, "store_erase", fail)
    with pytest.raises(StoreError, match="erasing stopped"):
        store.evict_context("a")
    assert payload(GEOM, chain(ROOT, A)[4]) in on_disk(kv)
    monkeypatch.undo()
    store.evict_context("b")
    assert payload(GEOM, chain(ROOT, A)[4])[128:] not in on_disk(kv)
    store.close()


# -- while a write is under way ------------------------------------------------------------------

MOMENTS = {
    "before the bytes": (_native, "store_write", "before"),
    "after the bytes": (_native, "store_write", "after"),
    "after bytes of a write that fails": (_native, "store_write", "failing"),
    "before the rows": (ChunkIndex, "apply", "before"),
    "after the rows": (ChunkIndex, "apply", "after"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_context_that_is_being_written_leaves_nothing(kv, monkeypatch, moment):
    place, name, when = MOMENTS[moment]
    do, erase_freed = getattr(place, name), ChunkWriter.erase_freed
    late, store = chain(ROOT, LATE), open_store(kv)
    store.evict_context("a")  # from here on, the store knows which places to erase
    save(store, LATE, "context-7741")
    waits, begun = threading.Event(), []

    def erase(swap):
        waits.set()  # the context has left the tree
        return erase_freed(swap)

    def delete():
        begun.append(pool.submit(store.evict_context, "context-7741"))
        assert waits.wait(60)

    def do_meanwhile(*args):
        if begun:
            return do(*args)
        if when == "before":
            delete()
        done = do(*args)
        if when != "before":
            wrote = payload(GEOM, late[0])[128:] if name == "store_write" else late[0].tokens
            assert wrote in on_disk(kv)
            delete()
        if when == "failing":
            raise StoreError(5, "chunk store: writing stopped")
        return done

    monkeypatch.setattr(ChunkWriter, "erase_freed", erase)
    monkeypatch.setattr(place, name, do_meanwhile)
    with ThreadPoolExecutor(1) as pool:
        store.flush()
    assert begun[0].result() > 0
    assert left_of(kv, late) == []
    assert b"context-7741" not in on_disk(kv)
    store.close()
    assert left_of(kv, late) == []
    assert b"context-7741" not in on_disk(kv)


# -- disk_budget = 0 ----------------------------------------------------------------------------


def test_an_older_store_is_named(kv, caplog):
    open_store(kv).close()
    before = {path.name for path in kv.iterdir()}
    KVChunks(KVChunksConfig(store=kv, disk_budget=0, ram_budget=BUDGET)).llmaas_kv_evict("a")
    assert f"disk_budget is 0, but {kv} still holds contexts" in caplog.text
    assert {path.name for path in kv.iterdir()} == before


# -- looking at a store -------------------------------------------------------------------------


def test_an_app_may_start_while_somebody_looks(kv, monkeypatch):
    read, started = snapshot._contents, []

    def start_meanwhile(*args):
        if not started:
            started.append(open_store(kv))
            save(started[0], LATE, "new")
            started[0].flush()
        return read(*args)

    monkeypatch.setattr(snapshot, "_contents", start_meanwhile)
    found = snapshot.read_snapshot(kv)
    assert found.holder == "this process already"  # the file was read again
    assert set(found.contexts) == {"a", "b", "new"}
    started[0].close()


def test_those_who_look_do_not_meet_each_other(kv):
    with (kv / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert snapshot.read_snapshot(kv).holder is None


def test_an_app_waits_for_a_glance(kv, monkeypatch):
    looking = os.open(kv / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(store_lock.time, "sleep", lambda _: os.close(looking))
    open_store(kv).close()
