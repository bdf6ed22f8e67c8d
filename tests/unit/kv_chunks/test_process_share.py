"""The RAM tier takes only what a limit for the whole process leaves to it, and gives it back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from stored_chunks import put

from llmaas_hooks import BudgetError
from llmaas_plugins import process_memory
from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.transfer.staging import NoRoomNowError, Staging

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
RAM = 16 * PAGE
A, B = (chain(ROOT, np.arange(start, start + 48, dtype=np.int32)) for start in (0, 1000))


class Limit:
    """Limit that leaves ``left`` bytes beside what all users may take."""

    def __init__(self, left):
        self.left, self.takes_s = left, 0.0
        self.asked = []

    def room(self):
        return None if self.left is None else self.left - process_memory.releasable()

    def grant(self, n_bytes):
        self.asked.append(n_bytes)
        room = self.room()
        time.sleep(self.takes_s)
        return n_bytes if room is None else max(0, min(n_bytes, room))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let no store or limit of another test count."""
    monkeypatch.setattr(process_memory, "_limits", set())
    monkeypatch.setattr(process_memory, "_users", set())


@pytest.fixture
def limit():
    """Return a limit that leaves four pages."""
    limit = Limit(4 * PAGE)
    process_memory.add_limit(limit)
    return limit


def stats(store):
    names = ("ram_bytes", "withheld_bytes", "obtainable_bytes")
    return [store.stats()[name] // PAGE for name in names]


def keys(store):
    return {chunk.id.key for chunk in store.tree}


def test_without_a_limit_nothing_is_withheld():
    store = ChunkStore(Budget(RAM), None)
    assert stats(store) == [0, 0, 16]
    put(store, GEOM, A)
    assert process_memory.promised() == RAM - 3 * PAGE


def test_the_tier_grows_by_what_it_is_granted(limit):
    store = ChunkStore(Budget(RAM), None)
    assert stats(store) == [0, 16, 4]
    assert store.space.lendable("cells") == 4 * PAGE
    assert store.space.lendable_and_capacity("cells") == (4 * PAGE, store.space.capacity)
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert stats(store) == [4, 12, 4]
    assert keys(store) == {chunk.key for chunk in A[:1] + B}
    assert store.space.lend("cells", 3 * PAGE) == 3 * PAGE
    assert keys(store) == {B[0].key}
    limit.left = -3 * PAGE  # something else took memory, and cells must be given back
    assert store.space.lendable("cells") < 0
    limit.left = 8 * PAGE
    put(store, GEOM, A)
    assert len(keys(store)) == 4
    limit.left = None
    put(store, GEOM, B)
    assert len(keys(store)) == 6
    assert limit.asked
    assert store.space.capacity == RAM


def test_a_larger_part_of_the_limit_is_asked_for_once(limit):
    limit.left = 64 << 20
    store = ChunkStore(Budget(32 << 20), None)
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert limit.asked == [4 << 20]
    assert process_memory.promised() == (4 << 20) - 6 * PAGE


def test_chunks_are_written_before_their_memory_is_given_back(tmp_path):
    store = ChunkStore(Budget(RAM), DiskStore(tmp_path / "kv", 1 << 20))
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert process_memory.release(12 * PAGE) == 12 * PAGE  # pages without memory go first
    assert stats(store) == [4, 12, 16]
    assert process_memory.promised() == 0
    assert process_memory.release(2 * RAM) == 4 * PAGE
    assert stats(store) == [0, 16, 16]
    assert keys(store) == {chunk.key for chunk in A + B}
    store.close()


def test_chunks_in_use_leave_last_and_those_in_transfer_stay(tmp_path):
    store = ChunkStore(Budget(RAM), DiskStore(tmp_path / "kv", 1 << 20))
    put(store, GEOM, A)
    put(store, GEOM, B)
    path = [store.tree.get(one.key) for one in A]
    store.lock_working_set("engine", path)
    process_memory.release(RAM - 3 * PAGE)
    assert [chunk.ram >= 0 for chunk in path] == [True] * 3
    store.reader.fetch(path[:1])
    assert process_memory.release(RAM) == 2 * PAGE
    assert stats(store)[:2] == [1, 15]
    store.reader.unpin(path[:1])
    store.close()


def test_without_a_disk_chunks_are_lost_and_transfer_buffers_stay():
    store = ChunkStore(Budget(RAM), None)
    area = store.space.allocate_buffer(2 * PAGE)
    put(store, GEOM, A)
    store.lock_working_set("engine", list(store.tree))
    assert process_memory.releasable() == RAM - 2 * PAGE
    assert process_memory.release(RAM) == RAM - 2 * PAGE
    assert keys(store) == set()
    store.space.free_buffer(area)


def test_transfer_buffers_are_smaller_or_refused_for_now_with_the_cause(limit):
    limit.left = 8 << 20
    store = ChunkStore(Budget(256 << 20), None)
    staging = Staging(store.space)
    n_chunks = staging.segment_chunks(GEOM)
    assert 3 * n_chunks * PAGE <= 8 << 20
    limit.left = PAGE
    store = ChunkStore(Budget(256 << 20), None)
    staging = Staging(store.space)
    with pytest.raises(NoRoomNowError, match=r"raise memory\.budget or plugins\."):
        staging.segment_chunks(GEOM)
    limit.left = 8 << 20
    assert staging.segment_chunks(GEOM) == n_chunks


def test_a_tier_too_small_for_transfer_buffers_is_refused_for_good(limit):
    store = ChunkStore(Budget(2 * PAGE), None)
    with pytest.raises(BudgetError, match="ram_budget to at least") as caught:
        Staging(store.space).segment_chunks(GEOM)
    assert not isinstance(caught.value, NoRoomNowError)


def test_threads_are_not_granted_the_same_bytes(limit):
    limit.left, limit.takes_s = 2 * PAGE, 0.01
    store = ChunkStore(Budget(RAM), None)
    with ThreadPoolExecutor(4) as pool:
        offsets = list(pool.map(store.space.reserve, [PAGE] * 4))
    assert sorted(offset is None for offset in offsets) == [False, False, True, True]
    assert stats(store)[1] == 14


def test_a_closed_store_and_a_removed_limit_no_longer_count():
    limit = Limit(0)
    process_memory.add_limit(limit)
    store = ChunkStore(Budget(RAM), None)
    assert store.space.capacity == 0
    process_memory.remove_limit(limit)
    assert store.space.capacity == RAM
    put(store, GEOM, A)
    assert process_memory.releasable() > 0
    del store
    assert process_memory.releasable() == 0


def test_an_allowance_limits_the_tier_and_takes_back_what_is_more(limit, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.process_share._LEAST", 0)
    limit.left = 2 * RAM
    store = ChunkStore(Budget(RAM), None)
    put(store, GEOM, A)
    put(store, GEOM, B)
    share = store.space.process
    assert share.releasable_bytes == share.allowed_bytes > 4 * PAGE
    share.allow(4 * PAGE)
    assert share.releasable_bytes == share.allowed_bytes == store.space.capacity == 4 * PAGE
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert len(keys(store)) == 4
    share.allow(8 * PAGE)
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert len(keys(store)) == 6
    assert 4 * PAGE < share.releasable_bytes <= 8 * PAGE
    assert store.claims()[0].held == 8 * PAGE


def test_an_allowance_leaves_what_runs_and_room_for_more(limit):
    limit.left = 2 * RAM
    store = ChunkStore(Budget(RAM), None)
    put(store, GEOM, A)
    store.lock_working_set("engine", [store.tree.get(one.key) for one in A])
    store.space.process.allow(0)
    assert store.space.process.allowed_bytes == 3 * PAGE + (8 << 20)
    assert store.claims()[0].least == RAM  # all that it has
    assert len(keys(store)) == 3


def test_parked_cells_count_as_taken(limit, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.process_share._LEAST", 0)
    limit.left = 2 * RAM
    store = ChunkStore(Budget(RAM), None)
    store.space.process.allow(6 * PAGE)
    for _ in range(5):
        store.space.lend("cells", max(0, store.space.lendable("cells")))
    assert store.stats()["lent_bytes"] <= 6 * PAGE
