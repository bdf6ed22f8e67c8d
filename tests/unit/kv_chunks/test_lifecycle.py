"""LCTRU eviction, working sets, ghosts of lost chunks, and the write budget (LLMS §3.4)."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from page_stores import BOUND, ROOT, save
from stored_chunks import encoder, payload

from llmaas_plugins._native import Codec, KVGeometry, chunk_bound, chunk_peek
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.eviction import EvictionQueue
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.tree import Chunk


def tokens(first, n_chunks):
    return np.arange(first, first + 16 * n_chunks, dtype=np.int32)


def in_ram(store, ids):
    return [i for i, chunk in enumerate(store.find(ids)) if chunk is not None and chunk.ram >= 0]


# -- which chunk goes first ---------------------------------------------------------------------


def make_chunks(*bits):
    ids = chain(ROOT, tokens(0, len(bits)))
    return [Chunk(wanted, PAGE, level) for wanted, level in zip(ids, bits, strict=True)]


@pytest.mark.parametrize(
    ("eviction", "order"), [("lctru", [1, 4, 0, 3, 2]), ("lru", [0, 1, 2, 3, 4])]
)
def test_chunks_with_most_bits_go_first_under_lctru_alone(eviction, order):
    queue, chunks = EvictionQueue(eviction), make_chunks(4, 8, 2, 4, 8)
    for chunk in chunks:
        queue.add(chunk)
    assert [chunks.index(chunk) for chunk in queue] == order
    assert len(queue) == 5


def test_use_moves_a_chunk_to_the_end_of_its_level():
    queue, chunks = EvictionQueue("lctru"), make_chunks(4, 4, 8)
    for chunk in chunks:
        queue.add(chunk)
    queue.touch(chunks[0])
    assert list(queue) == [chunks[2], chunks[1], chunks[0]]


def test_chunk_that_is_not_there_does_not_leave():
    queue, (a, b) = EvictionQueue("lctru"), make_chunks(4, 8)
    queue.add(a)
    queue.touch(b)
    assert not queue.remove(b)
    assert queue.remove(a)
    assert len(queue) == 0


def test_ram_is_taken_from_the_heaviest_chunks(open_store):
    store = open_store(ram=8, disk=50, eviction="lctru")
    a = save(store, tokens(0, 4), bits=(8, 4, 2, 8))
    b = save(store, tokens(1000, 4), bits=(4, 4, 4, 4))
    store.flush()
    c = save(store, tokens(2000, 2), bits=(4, 4))
    assert (in_ram(store, a), in_ram(store, b), in_ram(store, c)) == ([1, 2], [0, 1, 2, 3], [0, 1])


def test_working_set_goes_last(open_store):
    store = open_store(ram=8, disk=50, eviction="lctru")
    a = save(store, tokens(0, 4), bits=(8, 8, 8, 8))
    b = save(store, tokens(1000, 4), bits=(4, 4, 4, 4))
    store.lock_working_set("engine", store.find(a))
    store.flush()
    save(store, tokens(2000, 3), bits=(4, 4, 4))
    assert (in_ram(store, a), in_ram(store, b)) == ([0, 1, 2, 3], [0])
    save(store, tokens(3000, 4), bits=(2, 2, 2, 2))
    store.flush()
    store.lock_working_set("engine", store.find(b))
    save(store, tokens(4000, 4), bits=(2, 2, 2, 2))
    assert in_ram(store, a) == []


def test_working_set_gives_way_when_nothing_else_can(open_store):
    store = open_store(ram=4, disk=50)
    a = save(store, tokens(0, 4))
    store.lock_working_set("engine", store.find(a))
    store.flush()
    b = save(store, tokens(1000, 4))
    assert in_ram(store, b) == [0, 1, 2, 3]


def test_room_that_became_free_takes_back_what_was_used_last(open_store, reads_ahead):
    store = open_store(ram=8, disk=50)
    a = save(store, tokens(0, 4), name="a")
    b = save(store, tokens(1000, 4), name="b")
    store.flush()
    c = save(store, tokens(2000, 5), name="c")
    store.flush()
    assert (in_ram(store, a), in_ram(store, b), in_ram(store, c)) == (
        [],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    )
    store.evict_context("c")
    store.reader.refill()
    assert (in_ram(store, a), in_ram(store, b)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert reads_ahead == [True]
    assert store.stats()["refilled_chunks"] == 5
    assert all(chunk.pins == 0 for chunk in store.tree)
    before = store.stats()["read_bytes"]
    store.reader.refill()
    assert store.stats()["read_bytes"] == before


def test_context_that_goes_on_elsewhere_makes_room_for_itself_first(open_store):
    store = open_store(ram=20, disk=50)
    other = save(store, tokens(5000, 3), name="other")
    save(store, tokens(0, 5), name="a")
    save(store, np.concatenate([tokens(0, 2), tokens(900, 1)]), name="b")
    store.flush()
    ids = chain(ROOT, np.concatenate([tokens(0, 1), tokens(700, 4)]))
    store.drop_replaced_tail("a", ids)
    assert [c is None for c in store.find(chain(ROOT, tokens(0, 5)))] == [False] * 2 + [True] * 3
    assert in_ram(store, other) == [0, 1, 2]
    store.drop_replaced_tail("nobody", ids)
    assert store.tree.contexts().keys() == {"other", "a", "b"}


# -- ghosts -------------------------------------------------------------------------------------


def test_lost_chunk_leaves_a_ghost_that_the_next_save_fills(open_store):
    store = open_store(ram=20, disk=50)
    ids = save(store, tokens(0, 5), bits=(4, 4, 4, 4, 4), name="a")
    store.add_attention(ids, [1.0] * 5, [2.0] * 5)
    store.reader.drop_damaged(store.find(ids)[2])
    path, n_tokens = store.match(ROOT, tokens(0, 5))
    assert [chunk.is_ghost for chunk in path] == [False, False, True, False, False]
    assert n_tokens == 80
    assert store.reader.fetch(path[2:]) == []
    assert store.missing(ids) == [2]
    save(store, tokens(0, 5), bits=(8, 8, 8, 8, 8), name="a")
    path, _ = store.match(ROOT, tokens(0, 5))
    assert [chunk.bits for chunk in path] == [4, 4, 8, 4, 4]
    assert (path[2].attention, path[2].n_scores) == (1.0, 2.0)
    store.flush()
    store = open_store(ram=20, disk=50)
    assert store.match(ROOT, tokens(0, 5)).n_tokens == 80


def test_chunk_lost_during_its_transfer_keeps_its_bytes_until_the_end(open_store):
    store = open_store(ram=20, disk=50)
    save(store, tokens(0, 3))
    path, _ = store.match(ROOT, tokens(0, 3))
    store.reader.fetch(path)
    store.reader.drop_damaged(path[1])
    used = store.stats()["ram_bytes"]
    assert store.match(ROOT, tokens(0, 3)).path[1].is_ghost
    store.reader.unpin(path)
    assert store.stats()["ram_bytes"] == used - PAGE


def test_prompt_that_ends_with_ghosts_matches_what_is_before_them(open_store):
    store = open_store(ram=20, disk=50)
    ids = save(store, tokens(0, 5))
    for i in (2, 3):
        store.reader.drop_damaged(store.find(ids)[i])
    path, n_tokens = store.match(ROOT, tokens(0, 4))
    assert (len(path), n_tokens) == (2, 32)


def test_ghosts_go_with_the_last_chunk_behind_them(open_store):
    store = open_store(ram=20, disk=50)
    ids = save(store, tokens(0, 4), name="a")
    for i in (1, 2, 3):
        store.reader.drop_damaged(store.find(ids)[i])
    assert store.stats()["chunks"] == 1
    assert store.tree.contexts() == {"a": ids[0].key}


def test_deleted_context_takes_its_ghosts_along(open_store):
    store = open_store(ram=20, disk=50)
    ids = save(store, tokens(0, 4), name="a")
    store.reader.drop_damaged(store.find(ids)[1])
    store.evict_context("a")
    assert len(store.tree) == 0
    assert (store.stats()["ram_bytes"], store.stats()["disk_bytes"]) == (0, 0)


# -- what is written a day ----------------------------------------------------------------------


def test_no_more_is_written_a_day_than_allowed(open_store):
    store = open_store(ram=20, disk=50, write_budget=3 * PAGE)
    save(store, tokens(0, 5))
    store.flush()
    n_payload = store.stats()["written_bytes"]
    assert n_payload == 3 * BOUND
    assert store.stats()["over_write_budget"] > 0
    store.flush()
    assert store.stats()["written_bytes"] == n_payload
    assert store.match(ROOT, tokens(0, 5)).n_tokens == 80  # the rest is in RAM


def test_write_budget_of_a_day_holds_over_restarts(open_store):
    store = open_store(ram=20, disk=50, write_budget=3 * PAGE)
    save(store, tokens(0, 5))
    store = open_store(ram=20, disk=50, write_budget=3 * PAGE)
    n_before = store.match(ROOT, tokens(0, 5)).n_tokens
    save(store, tokens(1000, 5))
    store.flush()
    assert n_before == 48
    assert store.stats()["written_bytes"] == 0


def test_next_day_has_a_budget_of_its_own(open_store, monkeypatch):
    store = open_store(ram=20, disk=50, write_budget=3 * PAGE)
    save(store, tokens(0, 5))
    store.flush()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    store.flush()
    assert store.stats()["written_bytes"] == 5 * BOUND
    monkeypatch.setattr(time, "time", lambda: now - 10 * 86400)
    save(store, tokens(1000, 5))
    store.flush()
    assert store.stats()["written_bytes"] == 5 * BOUND + 1 * BOUND


def test_chunks_that_may_not_be_written_give_way_from_their_end(open_store):
    store = open_store(ram=6, disk=50, write_budget=0)
    a = save(store, tokens(0, 4))
    b = save(store, tokens(1000, 4))
    assert in_ram(store, b) == [0, 1, 2, 3]
    assert in_ram(store, a) == [0, 1]
    assert store.stats()["written_bytes"] == 0


# -- demotion (LLMS §3.2) -----------------------------------------------------------------------


WIDE = KVGeometry(1, False, 1, 1, (1024,), (1024,))  # 8 bits take 5 pages, 2 bits 2


def sizes(n_tokens, bits):
    return chunk_bound(WIDE, Codec.PLANES, n_tokens, bits)


def save_wide(store, values, bits):
    ids = chain(ROOT, values)
    for i in store.missing(ids):
        bound = sizes(16, bits[i])
        assert store.put(ids[i], bound, encoder(WIDE, ids[i], bits[i]), is_first=i == 0)
    store.touch(ids)
    return ids


def contents(store, values):
    path, _ = store.match(ROOT, values)
    addresses = store.reader.fetch(path)
    found = [ctypes.string_at(a, c.size) for a, c in zip(addresses, path, strict=True)]
    store.reader.unpin(path)
    return found


def test_demoted_chunk_is_the_beginning_of_what_it_was_in_every_tier(open_store):
    store = open_store(ram=40, disk=50)
    ids = save_wide(store, tokens(0, 4), [8, 8, 4, 8])
    store.flush()
    before = store.stats()
    store.reduce_bits(ids, [8, 2, 8, 4], sizes)
    after = store.stats()
    assert after["levels"] == {"8": 1, "4": 2, "2": 1}
    assert after["ram_bytes"] < before["ram_bytes"]
    assert after["disk_bytes"] == after["ram_bytes"]
    assert (after["cut_chunks"], after["written_bytes"]) == (2, before["written_bytes"])
    expected = [payload(WIDE, wanted, b) for wanted, b in zip(ids, [8, 2, 4, 4], strict=True)]
    found = contents(store, tokens(0, 4))
    assert [data[128:] for data in found] == [data[128:] for data in expected]
    store = open_store(ram=40, disk=50)
    found = contents(store, tokens(0, 4))
    assert [chunk_peek(data).bits for data in found] == [8, 2, 4, 4]
    assert store.stats()["faults"] == 0


def test_gaps_that_demotions_left_are_closed_for_new_chunks(open_store):
    store = open_store(ram=60)
    ids = save_wide(store, tokens(0, 12), [8] * 12)  # 5 pages each
    store.reduce_bits(ids, [6] * 12, sizes)
    path, _ = store.match(ROOT, tokens(0, 12))
    store.reader.fetch(path[2:3])
    in_use = path[2].ram
    store.compact()
    more = save_wide(store, tokens(1000, 1), [8])
    assert path[2].ram == in_use
    store.reader.unpin(path[2:3])
    found = contents(store, tokens(0, 12))
    assert [data[128:] for data in found] == [payload(WIDE, wanted, 6)[128:] for wanted in ids]
    assert contents(store, tokens(1000, 1)) == [payload(WIDE, wanted, 8) for wanted in more]


def test_chunk_in_use_is_not_demoted(open_store):
    store = open_store(ram=40, disk=50)
    ids = save_wide(store, tokens(0, 2), [8, 8])
    path, _ = store.match(ROOT, tokens(0, 2))
    store.reader.fetch(path[:1])
    store.reduce_bits(ids, [2, 2], sizes)
    assert [chunk.bits for chunk in path] == [8, 2]
    store.reader.unpin(path[:1])


def test_attention_of_chunks_is_remembered(open_store):
    store = open_store(ram=40, disk=50)
    ids = save_wide(store, tokens(0, 2), [4, 4])
    store.add_attention(ids, [0.5, 0.25], [2.0, 4.0])
    store.flush()
    store.add_attention(ids, [0.5, 0.25], [10.0, 1.0])
    store = open_store(ram=40, disk=50)
    found = [(chunk.attention, chunk.n_scores) for chunk in store.find(ids)]
    assert found == [(1.0, 12.0), (0.25, 4.0)]  # the index is updated when the value doubles
