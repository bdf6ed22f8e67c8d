"""Claim, reclaim, load: chunks come back unchanged, within the budget of RAM."""

from __future__ import annotations

import ctypes

import pytest
from page_stores import BOUND, GEOM, ROOT, load, put, save, text
from stored_chunks import payload

from llmaas_plugins.kv_chunks.store import chunk_store
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.extents import PAGE

# -- claim and load -----------------------------------------------------------------------------


def test_chunks_come_back_from_ram(open_store):
    store = open_store(ram=8)
    tokens = text((0, 70))
    save(store, tokens)
    assert load(store, tokens) == 70
    stats = store.stats()
    assert (stats["claimed_chunks"], stats["ram_hits"], stats["disk_hits"]) == (5, 5, 0)
    assert stats["claimed_bytes"] == sum(chunk.size for chunk in store.tree)
    assert stats["ram_bytes"] == 5 * PAGE
    assert stats["store"] is None


def test_chunks_come_back_from_disk(open_store):
    store = open_store(ram=8, disk=20)
    tokens = text((0, 70))
    save(store, tokens, "mine")
    heads = store.tree.contexts()
    store = open_store(ram=8, disk=20)
    assert store.stats()["ram_bytes"] == 0
    assert load(store, tokens) == 70
    assert store.tree.contexts() == heads
    stats = store.stats()
    assert (stats["disk_hits"], stats["faults"], stats["chunks"]) == (5, 0, 5)
    assert stats["read_bytes"] == sum(chunk.size for chunk in store.tree)
    assert load(store, tokens) == 70
    assert store.stats()["ram_hits"] == 5


def test_memory_has_only_so_many_layouts(open_store, monkeypatch):
    monkeypatch.setattr(chunk_store, "_MOST_LAYOUTS", 2)
    store = open_store(ram=8, disk=20)
    roots = [bytes([i]) * 32 for i in range(4)]
    for root in roots:
        store.set_layout(root, "{}")
    assert [*store._layouts] == roots[2:]
    store.flush()
    assert store.layout(roots[0]) == "{}"  # from disk


def test_the_tiers_of_a_contexts_tokens(open_store):
    store = open_store(ram=8, disk=20)
    tokens = text((0, 70))
    assert store.stored("mine") is None
    save(store, tokens, "mine")
    found = store.stored("mine")
    assert (found.root, found.tokens.tolist()) == (ROOT, tokens.tolist())
    assert (found.in_ram.sum(), found.on_disk.sum()) == (70, 0)
    store.flush()
    assert store.stored("mine").on_disk.sum() == 70
    store = open_store(ram=8, disk=20)
    assert load(store, tokens[:32]) == 32
    found = store.stored("mine")
    assert found.in_ram.tolist() == [True] * 32 + [False] * 38
    assert found.on_disk.all()


def test_only_missing_chunks_are_claimed(open_store):
    store = open_store(ram=20)
    ids = save(store, text((0, 40)))
    assert store.missing(ids) == []
    assert store.missing(chain(ROOT, text((0, 64)))) == [2, 3]
    assert put(store, ids[0])  # another engine was faster
    assert store.stats()["claimed_chunks"] == 3
    assert store.stats()["ram_bytes"] == 3 * PAGE


def test_claim_keeps_only_what_was_written(open_store):
    store = open_store(ram=10)
    ids = chain(ROOT, text((0, 32)))
    assert put(store, ids[0], bound=8 * PAGE)
    assert store.stats()["ram_bytes"] == PAGE
    assert put(store, ids[1], bound=8 * PAGE)
    assert load(store, text((0, 32))) == 32


def test_chunk_without_its_parent_is_not_kept(open_store):
    store = open_store(ram=8)
    ids = chain(ROOT, text((0, 64)))
    assert put(store, ids[0])
    assert not put(store, ids[2])
    assert store.stats()["ram_bytes"] == PAGE
    assert put(store, ids[1])
    assert put(store, ids[2])


def test_failed_encoder_leaves_no_trace(open_store):
    store = open_store(ram=4)

    def encode(out):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put(chain(ROOT, text((0, 16)))[0], BOUND, encode, is_first=True)
    assert store.stats()["ram_bytes"] == store.stats()["chunks"] == 0


def test_old_bytes_do_not_leak_into_the_slab(open_store, tmp_path):
    store = open_store(ram=1, disk=20)
    store._residency.ram.view(0, PAGE)[:] = 0x5A
    (wanted,) = save(store, text((0, 3)))
    store.flush()
    content = (tmp_path / "kv/chunks.slab").read_bytes()
    assert content[PAGE : 2 * PAGE] == payload(GEOM, wanted).ljust(PAGE, b"\0")


def test_continued_partial_chunk_is_dropped(open_store):
    store = open_store(ram=20, disk=20)
    save(store, text((0, 20)))
    store.flush()
    save(store, text((0, 40)))
    assert sorted(chunk.n_tokens for chunk in store.tree) == [8, 16, 16]
    save(store, text((0, 45)))
    assert sorted(chunk.n_tokens for chunk in store.tree) == [13, 16, 16]
    store.flush()
    assert store.stats()["disk_bytes"] == store.stats()["ram_bytes"] == 3 * PAGE


def test_partial_chunk_that_a_context_ends_with_stays(open_store):
    store = open_store(ram=20)
    save(store, text((0, 20)), "short")
    save(store, text((0, 40)), "long")
    assert sorted(chunk.n_tokens for chunk in store.tree) == [4, 8, 16, 16]
    assert load(store, text((0, 20), (900, 20))) == 20


# -- RAM budget ---------------------------------------------------------------------------------


def test_more_than_fits_ram_is_loaded_from_disk(open_store):
    store = open_store(ram=6, disk=200)
    contexts = [text((1000 * i, 64)) for i in range(10)]
    for tokens in contexts:
        save(store, tokens)
        assert store.stats()["ram_bytes"] <= 6 * PAGE
    for tokens in contexts:
        assert load(store, tokens) == 64
        assert store.stats()["ram_bytes"] <= 6 * PAGE
    stats = store.stats()
    assert stats["disk_hits"] >= 36
    assert stats["ram_reclaimed"] >= 34
    assert stats["no_room"] == 0


def test_dirty_chunks_are_flushed_to_make_room(open_store):
    store = open_store(ram=4, disk=200)
    for i in range(4):
        save(store, text((100 * i, 16)))
    assert store.stats()["written_bytes"] == 0
    save(store, text((900, 16)))
    assert store.stats()["written_bytes"] == sum(c.size for c in store.tree if c.disk >= 0) > 0
    assert [load(store, text((100 * i, 16))) for i in (0, 1, 2, 3, 9)] == [16] * 5


def test_pinned_chunks_stay_where_they_are(open_store):
    store = open_store(ram=4, disk=200)
    tokens = text((0, 64))
    save(store, tokens)
    store.flush()
    path, _ = store.match(ROOT, tokens)
    addresses = store.reader.fetch(path)
    assert not put(store, chain(ROOT, text((500, 16)))[0])
    assert store.stats()["no_room"] == 1
    assert [ctypes.string_at(a, c.size) for a, c in zip(addresses, path, strict=True)] == [
        payload(GEOM, chunk.id) for chunk in path
    ]
    store.reader.unpin(path[2:])
    assert put(store, chain(ROOT, text((500, 16)))[0])
    assert put(store, chain(ROOT, text((600, 16)))[0])
    assert [chunk.ram >= 0 for chunk in path] == [True, True, False, False]
    store.reader.unpin(path[:2])
    assert load(store, tokens) == 64


def test_fetch_of_more_than_fits_gives_the_leading_part(open_store):
    store = open_store(ram=4, disk=200)
    tokens = text((0, 160))
    save(store, tokens)
    assert load(store, tokens[:64]) == 64
    assert load(store, tokens) == 64
    assert store.stats()["no_room"] == 1


def test_two_may_pin_the_same_chunks(open_store):
    store = open_store(ram=2, disk=200)
    save(store, text((0, 32)))
    path, _ = store.match(ROOT, text((0, 32)))
    assert store.reader.fetch(path) == store.reader.fetch(path)
    store.reader.unpin(path)
    assert not put(store, chain(ROOT, text((500, 16)))[0])
    store.reader.unpin(path)
    assert put(store, chain(ROOT, text((500, 16)))[0])


def test_chunk_dropped_while_pinned_keeps_its_bytes_until_released(open_store):
    store = open_store(ram=2, disk=200)
    save(store, text((0, 32)), "a")
    store.flush()
    path, _ = store.match(ROOT, text((0, 32)))
    addresses = store.reader.fetch(path)
    assert store.evict_context("a") == sum(chunk.size for chunk in path)
    assert store.stats()["ram_bytes"] == 2 * PAGE
    assert not put(store, chain(ROOT, text((500, 16)))[0])
    assert ctypes.string_at(addresses[1], path[1].size) == payload(GEOM, path[1].id)
    store.reader.unpin(path)
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 0


def test_fetch_stops_at_a_chunk_that_is_gone(open_store):
    store = open_store(ram=8)
    save(store, text((0, 64)))
    path, _ = store.match(ROOT, text((0, 64)))
    store.reader.drop_damaged(path[2])
    assert len(store.reader.fetch(path)) == 2
    assert [chunk.pins for chunk in path] == [1, 1, 0, 0]
    store.reader.unpin(path[:2])


def test_closed_store_is_quiet(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    store.close()
    store.close()
    store.flush()
    store.set_layout(ROOT, "{}")
    assert store.layout(ROOT) == "{}"
    assert store.layout(b"other" * 6) is None
    assert store.stats()["store"] is None
    assert store.stats()["io_errors"] == 0


def test_geometry_is_kept_beside_the_chunks(open_store):
    store = open_store(ram=20, disk=50)
    assert store.layout(ROOT) is None
    store.set_layout(ROOT, '{"a": 1}')
    store = open_store(ram=20, disk=50)
    assert store.layout(ROOT) == '{"a": 1}'
    assert store.layout(b"x" * 32) is None


def test_layout_is_known_without_a_disk(open_store):
    store = open_store(ram=20)
    store.set_layout(ROOT, '{"a": 1}')
    assert store.layout(ROOT) == '{"a": 1}'
