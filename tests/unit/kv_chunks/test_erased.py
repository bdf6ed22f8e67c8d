"""A deletion from a KV store leaves no byte in its folder, or the call reports why."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reading import reader_of
from stored_chunks import payload, put

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.files import sqlite_erasing, store_lock
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.kv_chunks.maintenance import snapshot
from llmaas_plugins.kv_chunks.plugin import KVChunks
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.index import ChunkIndex

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))
BUDGET = 1 << 20
A = np.arange(16 * 6 + 5, dtype=np.int32)
B = np.concatenate([A[:32], np.arange(500, 548, dtype=np.int32)])
ONLY_A, ONLY_B = chain(ROOT, A)[2:], chain(ROOT, B)[2:]


def open_store(directory):
    return ChunkStore(Budget(BUDGET), DiskStore(directory, BUDGET))


@pytest.fixture
def kv(tmp_path):
    """Return a store that holds two contexts with a common beginning."""
    store = open_store(tmp_path / "kv")
    store.set_layout(ROOT, "{}")
    put(store, GEOM, chain(ROOT, A), "a")
    put(store, GEOM, chain(ROOT, B), "b")
    store.close()
    return tmp_path / "kv"


def everything(directory):
    return b"".join(path.read_bytes() for path in directory.iterdir())


def left_of(directory, ids):
    """Return the chunks whose keys, tokens or cells are in the folder's files."""
    data = everything(directory)
    # the other context's chunks, and shared ones
    assert all(one.tokens in data for one in chain(ROOT, B))
    cells = [payload(GEOM, one)[128:] for one in ids]
    return [
        i
        for i, one in enumerate(ids)
        if {one.key in data, one.tokens in data, cells[i] in data} != {False}
    ]


def n_found(store, tokens):
    path, _ = store.match(ROOT, tokens)
    n_ready = len(store.reader.fetch(path))
    store.reader.unpin(path[:n_ready])
    return n_ready


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
    command = [sys.executable, "-c", DIE, str(kv), where, step]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert left_of(kv, ONLY_A) or step == "gaps" or (where, step) == ("after", "log")
    store = open_store(kv)
    if (where, step) == ("before", "commit"):
        assert n_found(store, A) == len(chain(ROOT, A))
        store.evict_context("a")
    assert left_of(kv, ONLY_A) == []
    assert n_found(store, B) == len(chain(ROOT, B))
    assert not store._writer._disk.index.is_erasing()
    store.close()


def test_who_reads_is_named_while_bytes_are_left(kv, monkeypatch):
    monkeypatch.setattr(sqlite_erasing, "PATIENCE_S", 0.1)
    store = open_store(kv)
    put(store, GEOM, chain(ROOT, np.arange(9000, 9064, dtype=np.int32)), "late")
    store.flush()  # into the log
    late = chain(ROOT, np.arange(9000, 9064, dtype=np.int32))
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
    late, store = chain(ROOT, np.arange(9000, 9064, dtype=np.int32)), open_store(kv)
    store.evict_context("a")  # from here on, the store knows which places to erase
    put(store, GEOM, late, "context-7741")
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
            assert wrote in everything(kv)
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
    assert b"context-7741" not in everything(kv)
    store.close()
    assert left_of(kv, late) == []
    assert b"context-7741" not in everything(kv)


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
            put(started[0], GEOM, chain(ROOT, np.arange(9000, 9064, dtype=np.int32)), "new")
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
