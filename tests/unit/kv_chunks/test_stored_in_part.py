"""Contexts of which the disk has only a part: they are found again, and deleted as a whole."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from kv_stores import (
    BUDGET,
    GEOM,
    ROOT,
    A,
    B,
    assert_works,
    damage_chunk,
    edit,
    load,
    on_disk,
    open_store,
    save,
)
from stored_chunks import encoder, payload

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.maintenance.checking import check_store
from llmaas_plugins.kv_chunks.maintenance.cleanup import StoreCleanup
from llmaas_plugins.kv_chunks.maintenance.export import export_store
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE

ALL_A, ONLY_A, ONLY_B = chain(ROOT, A), chain(ROOT, A)[2:], chain(ROOT, B)[2:]
LATE = np.arange(9000, 9064, dtype=np.int32)
LOST = 4
"""Chunk of A in its middle, which only A has."""


def left_of(directory, ids):
    """Return the indices of chunks whose keys, tokens or cells are in the folder's files."""
    data = on_disk(directory)
    parts = [(one.key, one.tokens, payload(GEOM, one)[128:]) for one in ids]
    return [i for i, part in enumerate(parts) if any(one in data for one in part)]


def is_lost(store):
    return [chunk.is_ghost for chunk in store.match(ROOT, A).path]


@pytest.fixture
def holed(kv):
    """Return a store of which a chunk in the middle of A is not in the slab."""
    edit(kv, ("UPDATE chunks SET offset=? WHERE key=?", (1 << 39, ALL_A[LOST].key)))
    return kv


# -- the end is missing -------------------------------------------------------------------------


def test_a_context_of_which_no_more_may_be_written(tmp_path):
    disk = DiskStore(tmp_path / "kv", BUDGET)
    store = ChunkStore(Budget(BUDGET), disk, write_budget=3 * PAGE)
    save(store, A, "a")
    store.close()
    store = open_store(tmp_path / "kv")
    assert load(store, A) == 48
    assert store.evict_context("a") > 0
    assert left_of(tmp_path / "kv", ALL_A) == []
    store.close()


def test_a_context_that_grew_before_the_process_was_killed(tmp_path):
    store = open_store(tmp_path / "kv")
    save(store, A[:48], "a")
    save(store, LATE, "late")
    store.flush()
    save(store, A, "a")  # nothing of which is written when another context is deleted
    store.evict_context("late")
    killed = shutil.copytree(tmp_path / "kv", tmp_path / "killed")
    store.close()
    store = open_store(killed)
    assert load(store, A) == 48
    assert store.evict_context("a") > 0
    assert left_of(killed, ALL_A) == []
    store.close()


def test_a_context_that_is_still_being_saved(tmp_path, monkeypatch):
    """The process is killed after the disk got the first chunks of a context."""
    store, killed = open_store(tmp_path / "kv"), tmp_path / "killed"
    save(store, A[:16], "a")
    put = ChunkStore.put

    def put_and_flush(self, wanted, *args, **kwargs):
        is_put = put(self, wanted, *args, **kwargs)
        if wanted == ALL_A[5]:
            self.flush()
            shutil.copytree(tmp_path / "kv", killed)
        return is_put

    monkeypatch.setattr(ChunkStore, "put", put_and_flush)
    save(store, A, "a")
    store.close()
    store = open_store(killed)
    assert load(store, A) == 6 * 16
    assert store.evict_context("a") > 0
    assert left_of(killed, ALL_A) == []
    store.close()


def test_a_context_ends_with_its_last_chunk_while_a_lost_one_is_put_again(holed):
    store = open_store(holed)
    head = store.tree.contexts()["a"]
    lost = ALL_A[LOST]
    bound = len(payload(GEOM, lost))
    assert store.put(lost, bound, encoder(GEOM, lost), is_first=False, context_id="a")
    assert store.tree.contexts()["a"] == head == ALL_A[-1].key
    assert load(store, A) == len(A)
    store.close()


def test_a_context_that_goes_on_is_found_as_a_whole(tmp_path):
    """The index names the last chunk that it has, and later ones once they are written."""
    store = open_store(tmp_path / "kv")
    save(store, A[:48], "a")
    store.flush()
    save(store, A, "a")
    store._writer.commit()  # as a deletion does
    assert store._writer._disk.index.contexts() == {"a": ALL_A[2].key}
    store.flush()
    assert store._writer._disk.index.contexts() == {"a": ALL_A[-1].key}
    store.close()


def test_a_smaller_disk_budget_cuts_contexts(kv):
    store = ChunkStore(Budget(BUDGET), DiskStore(kv, 9 * PAGE))
    assert load(store, B) == 48  # two chunks of A, and one more
    assert store.evict_context("b") > 0
    assert left_of(kv, ONLY_B) == []
    assert load(store, A) == len(A)
    store.close()
    assert_works(kv)


# -- a chunk in the middle is missing -----------------------------------------------------------


@pytest.mark.parametrize("n_opened", [0, 1, 2])
def test_a_context_with_a_hole_is_deleted_as_a_whole(holed, n_opened):
    for _ in range(n_opened):
        store = open_store(holed)
        assert is_lost(store) == [i == LOST for i in range(len(ALL_A))]
        store.close()
    store = open_store(holed)
    store.evict_context("a")
    assert left_of(holed, ONLY_A) == []
    assert load(store, B) == len(B)
    store.close()
    assert left_of(holed, ONLY_A) == []


def test_a_chunk_that_was_damaged_in_an_earlier_process(kv):
    damage_chunk(kv, ROOT, A, LOST)
    store = open_store(kv)
    assert load(store, A) == LOST * 16
    store.close()  # before the context was saved again
    store = open_store(kv)
    assert is_lost(store) == [i == LOST for i in range(len(ALL_A))]
    assert store.stats()["faults"] == 0
    assert store.evict_context("a") > 0
    assert left_of(kv, ONLY_A) == []
    store.close()


def test_a_hole_is_filled_by_the_next_save(holed):
    assert_works(holed)


def test_a_hole_goes_with_the_last_chunk_behind_it(holed):
    store = open_store(holed)
    for chunk in reversed(store.match(ROOT, A).path[LOST + 1 :]):
        store.reader.drop_damaged(chunk)
    store.close()
    store = open_store(holed)
    assert load(store, A) == LOST * 16
    rows = {row.id for row in store._writer._disk.index.chunks()}
    assert rows.isdisjoint(ALL_A[LOST:])
    store.close()


def test_a_chunk_that_cannot_be_written_again(kv, monkeypatch):
    damage_chunk(kv, ROOT, A, LOST)
    store = open_store(kv)
    load(store, A)
    save(store, A, "a")  # only the lost one

    def fail(*args):
        raise StoreError(28, "chunk store: the disk is full")

    monkeypatch.setattr(_native, "store_write", fail)
    store.flush()
    monkeypatch.undo()
    assert is_lost(store) == [i == LOST for i in range(len(ALL_A))]
    assert store.evict_context("a") > 0
    assert left_of(kv, ONLY_A) == []
    store.close()


# -- maintenance --------------------------------------------------------------------------------


def test_a_hole_that_is_known_is_no_defect(holed, tmp_path):
    open_store(holed).close()
    assert check_store(holed).problems == []
    done = export_store(holed, tmp_path / "copy", "a")
    assert (done.n_chunks, done.skipped) == (LOST, len(ALL_A) - 1 - LOST)
    store = open_store(tmp_path / "copy")
    assert load(store, A) == LOST * 16
    assert set(store.tree.contexts()) == {"a"}
    store.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_context_with_a_hole_is_forgotten_by_command(holed, is_known):
    if is_known:
        open_store(holed).close()
    cleanup = StoreCleanup(holed)
    cleanup.forget("a")
    cleanup.finish(shrink=False)
    cleanup.close()
    assert left_of(holed, ONLY_A) == []
    assert check_store(holed).problems == []


@pytest.mark.parametrize("is_known", [False, True])
def test_another_context_is_forgotten_by_command(holed, is_known):
    if is_known:
        open_store(holed).close()
    cleanup = StoreCleanup(holed)
    cleanup.forget("b")
    cleanup.finish(shrink=False)
    cleanup.close()
    assert left_of(holed, ONLY_B) == []
    assert check_store(holed).problems == []
    store = open_store(holed)
    store.evict_context("a")
    assert left_of(holed, ALL_A) == []
    store.close()


def test_tidying_drops_what_is_behind_a_hole(holed):
    open_store(holed).close()
    cleanup = StoreCleanup(holed)
    cleanup.drop_damaged()
    cleanup.drop_unreachable()
    cleanup.finish(shrink=True)
    cleanup.close()
    assert left_of(holed, ALL_A[LOST:]) == []
    store = open_store(holed)
    assert load(store, A) == LOST * 16
    assert set(store.tree.contexts()) == {"a", "b"}
    store.close()
