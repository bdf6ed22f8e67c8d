"""RAM lent to cells: the part left for chunks, and the chunks evicted for it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from stored_chunks import encoder, payload, put

from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
RAM = 8 * PAGE
A, B = (chain(ROOT, np.arange(start, start + 48, dtype=np.int32)) for start in (0, 1000))


@pytest.fixture
def store():
    return ChunkStore(Budget(RAM), None)


def on_disk(tmp_path):
    return ChunkStore(Budget(RAM), DiskStore(tmp_path / "kv", 1 << 20))


def keys(store):
    return {chunk.id.key for chunk in store.tree}


def test_what_chunks_in_use_take_cannot_be_lent(store):
    assert store.space.lendable("cells") == RAM
    put(store, GEOM, A)
    assert store.space.lendable("cells") == RAM - 3 * PAGE
    store.touch(A)
    put(store, GEOM, A)  # again
    assert store.space.lendable("cells") == RAM - 3 * PAGE
    area = store.space.allocate_buffer(2 * PAGE)
    assert store.space.lendable("cells") == RAM - 5 * PAGE
    store.space.free_buffer(area)
    store.reader.drop_damaged(store.tree.get(A[2].key))
    assert store.space.lendable("cells") == RAM - 2 * PAGE


def test_the_ghost_of_a_chunk_takes_nothing(store):
    put(store, GEOM, A)
    store.reader.drop_damaged(store.tree.get(A[0].key))
    assert store.space.lendable("cells") == RAM - 2 * PAGE
    store.put(A[0], PAGE, encoder(GEOM, A[0]), is_first=True)
    assert store.space.lendable("cells") == RAM - 3 * PAGE


def test_a_chunk_takes_less_after_it_was_cut():
    geometry = KVGeometry(1, False, 1, 1, (1024,), (1024,))
    store = ChunkStore(Budget(64 * PAGE), None)
    whole, cut = (page_round(len(payload(geometry, A[0], bits))) for bits in (8, 2))
    store.put(A[0], 20 * PAGE, encoder(geometry, A[0], 8), is_first=True)
    assert store.space.lendable("cells") == 64 * PAGE - whole
    store.reduce_bits(A[:1], [2], lambda *_: len(payload(geometry, A[0], 2)))
    assert cut < whole
    assert store.space.lendable("cells") == 64 * PAGE - cut


def test_chunks_that_nobody_used_since_the_start_do_not_count(tmp_path):
    store = on_disk(tmp_path)
    put(store, GEOM, A)
    put(store, GEOM, B)
    store.close()
    store = on_disk(tmp_path)
    assert store.space.lendable("cells") == RAM
    store.touch(A)
    assert store.space.lendable("cells") == RAM - 3 * PAGE
    store.close()


def test_contexts_in_use_count_where_ever_they_are(tmp_path):
    store = on_disk(tmp_path)
    put(store, GEOM, A)
    put(store, GEOM, B)
    store.flush()
    assert store.space.lend("cells", RAM) == RAM  # the chunks are on disk
    assert store.stats()["ram_bytes"] == 0
    assert keys(store) == {chunk.key for chunk in A + B}
    assert store.space.lendable("cells") == RAM - 6 * PAGE
    store.close()


def test_what_is_not_on_disk_yet_is_written_first(tmp_path):
    store = on_disk(tmp_path)
    put(store, GEOM, A)
    assert store.space.lend("cells", RAM - PAGE) == RAM - PAGE
    assert store.stats()["ram_bytes"] == PAGE
    assert keys(store) == {chunk.key for chunk in A}
    store.close()


def test_without_a_disk_the_oldest_contexts_get_shorter(store):
    put(store, GEOM, A)
    put(store, GEOM, B)
    assert store.space.lend("cells", 4 * PAGE) == 4 * PAGE
    assert keys(store) == {chunk.key for chunk in A[:1] + B}


def test_chunks_in_transfer_stay(store):
    put(store, GEOM, A)
    path = [store.tree.get(one.key) for one in A]
    store.reader.fetch(path)
    assert store.space.lend("cells", RAM) == RAM - 3 * PAGE
    store.reader.unpin(path)
    assert store.space.lend("cells", RAM) == RAM


def test_a_fetch_that_fails_holds_nothing(tmp_path, monkeypatch):
    store = on_disk(tmp_path)
    put(store, GEOM, A)
    store.flush()
    assert store.space.lend("cells", RAM) == RAM  # the chunks are on disk
    store.space.lend("cells", 0)
    path = [store.tree.get(one.key) for one in A]
    reserve, sizes = store._residency.reserve_ram, []

    def failing(n_bytes, parent):
        sizes.append(n_bytes)
        if len(sizes) == len(A):
            raise MemoryError
        return reserve(n_bytes, parent)

    monkeypatch.setattr(store._residency, "reserve_ram", failing)
    with pytest.raises(MemoryError):
        store.reader.fetch(path)
    monkeypatch.undo()
    assert [chunk.pins for chunk in path] == [0] * len(path)
    assert store.space.reserve(RAM) is not None
    store.close()


def test_owners_that_are_gone_are_removed_by_several_threads_at_once(store):
    class Seen(deque):
        """Owners of which another thread removes the last one as soon as this one saw it."""

        def __len__(self):
            n = super().__len__()
            if n == 1 and not others:
                others.append(threading.Thread(target=store.space.remove_closed_owners))
                others[0].start()
                others[0].join()
            return n

    others = []
    store.space.lend("cells", RAM)
    store.space._closed_owners = Seen(["cells"])
    store.space.remove_closed_owners()
    assert others
    assert store.space.lend("other", RAM) == RAM


def test_new_chunks_leave_what_is_lent_alone(store):
    assert store.space.lend("cells", RAM - 2 * PAGE) == RAM - 2 * PAGE
    put(store, GEOM, A[:2])
    put(store, GEOM, B[:2])
    assert keys(store) == {chunk.key for chunk in B[:2]}
    assert not store.put(B[2], 3 * PAGE, encoder(GEOM, B[2]), is_first=False)
    # nothing is evicted for chunks that cannot fit
    assert keys(store) == {chunk.key for chunk in B[:2]}
    assert store.space.lend("cells", 0) == 0
    put(store, GEOM, A)
    assert keys(store) == {chunk.key for chunk in A + B[:2]}


def test_engines_do_not_count_twice_on_the_same_memory(store):
    assert store.space.lend("one", 3 * PAGE) == 3 * PAGE
    assert store.space.lendable("one") == RAM
    assert store.space.lendable("other") == RAM - 3 * PAGE
    assert store.space.lend("other", RAM) == RAM - 3 * PAGE
    assert store.space.lend("one", 4 * PAGE) == 3 * PAGE
    assert store.space.lend("other", 0) == 0
    assert store.space.lend("one", 4 * PAGE) == 4 * PAGE


def test_pages_of_chunks_that_went_hold_no_memory_once_they_are_lent():
    n_bytes = 32 << 20
    geometry = KVGeometry(1, False, 1, 1, (1 << 16,), (1 << 16,))
    bound = len(payload(geometry, A[0])) + PAGE
    store = ChunkStore(Budget(n_bytes), None)
    ids = chain(ROOT, np.arange(16 * (n_bytes // bound), dtype=np.int32))
    for i, one in enumerate(ids):
        assert store.put(one, bound, encoder(geometry, one), is_first=i == 0)
    before = resident_bytes()
    assert store.space.lend("cells", n_bytes // 2) == n_bytes // 2
    assert before - resident_bytes() > n_bytes // 4
    for chunk in store.tree:
        (address,) = store.reader.fetch([chunk])
        offset = address - store._residency.ram.address(0)
        found = store._residency.ram.view(offset, chunk.size)
        assert bytes(found) == payload(geometry, chunk.id)
        store.reader.unpin([chunk])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
