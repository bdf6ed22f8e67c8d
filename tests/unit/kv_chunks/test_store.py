"""Claim, reclaim, load, fault: chunks come back unchanged, within every budget."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from stored_chunks import encoder, payload

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import (
    Budget,
    Codec,
    KVGeometry,
    chunk_bound,
)
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
BOUND = chunk_bound(GEOM, Codec.RAW, 16)


def text(*parts):
    """Return token ids from (first, count) pairs."""
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in parts])


def put(store, wanted, bound=BOUND):
    return store.put(wanted, bound, encoder(GEOM, wanted), is_first=wanted.parent == ROOT)


def save(store, tokens, name=None):
    """Save cells of ``tokens`` as ``Transfer.save`` does."""
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        if not put(store, ids[i]):
            break
    store.touch(ids)
    if name is not None:
        store.set_head(name, ids)
    return ids


def load(store, tokens):
    """Return the token count of loaded leading chunks; assert that none changed."""
    path, _ = store.match(ROOT, tokens)
    addresses = store.reader.fetch(path)
    ready = path[: len(addresses)]
    for chunk, address in zip(ready, addresses, strict=True):
        assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)
    store.reader.unpin(ready)
    assert all(chunk.pins == 0 for chunk in store.tree)
    return sum(chunk.n_tokens for chunk in ready)


@pytest.fixture
def open_store(tmp_path):
    """Return a function that opens a store with a size in pages, closing the one before."""
    stores = []

    def opened(ram, disk=0):
        if stores:
            stores.pop().close()
        tier = DiskStore(tmp_path / "kv", disk * PAGE) if disk else None
        stores.append(ChunkStore(Budget(ram * PAGE), tier))
        return stores[-1]

    yield opened
    if stores:
        stores.pop().close()


def slab(store):
    return store._residency.disk.fd


@contextmanager
def slab_is(store, path, flags):
    """Replace the slab's descriptor by another file inside the block."""
    fd, other = slab(store), os.open(path, flags)
    kept = os.dup(fd)
    os.dup2(other, fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)
        os.close(other)


@contextmanager
def files_up_to(n_bytes):
    """Simulate a full disk: every file, the index too, ends at ``n_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


# -- eviction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [0, 7])  # a page of the slab is its header
def test_contexts_are_shortened_from_their_end_the_oldest_first(open_store, disk):
    store = open_store(ram=6, disk=disk)
    a, b = text((0, 64)), text((1000, 64))
    save(store, a, "a")
    store.flush()
    save(store, b, "b")
    store.flush()
    assert (load(store, a), load(store, b)) == (32, 64)
    load(store, a)
    store.touch(chain(ROOT, a))
    save(store, text((2000, 48)))
    store.flush()
    assert (load(store, a), load(store, b)) == (32, 16)


def test_contexts_that_wait_for_the_same_flush_leave_in_their_order(open_store):
    store = open_store(ram=20, disk=7)
    a, b = text((0, 48)), text((1000, 48))
    save(store, a)
    save(store, b)
    store.flush()
    save(store, text((2000, 32)))
    store.flush()
    assert (load(store, a), load(store, b)) == (16, 48)


def test_order_of_use_survives(open_store):
    store = open_store(ram=30, disk=13)
    contexts = [text((1000 * i, 48)) for i in range(4)]
    for i in (2, 0, 3, 1):
        save(store, contexts[i])
    store.flush()
    store.touch(chain(ROOT, contexts[2]))
    store = open_store(ram=30, disk=13)
    lengths = []
    for i in range(4):
        save(store, text((9000 + 100 * i, 48)))
        store.flush()
        lengths.append([store.match(ROOT, tokens).n_tokens for tokens in contexts])
    assert lengths == [[0, 48, 48, 48], [0, 48, 48, 0], [0, 0, 48, 0], [0, 0, 0, 0]]


def test_beginnings_stay_in_ram_the_longest(open_store):
    store = open_store(ram=6, disk=50)
    save(store, text((0, 64)))
    store.flush()
    save(store, text((1000, 64)))
    path, _ = store.match(ROOT, text((0, 64)))
    assert [chunk.ram >= 0 for chunk in path] == [True, True, False, False]


@pytest.mark.parametrize(("ram", "disk"), [(6, 0), (20, 7), (4, 7), (400, 70)])
def test_context_that_does_not_fit_keeps_its_beginning(open_store, ram, disk):
    store = open_store(ram, disk)
    tokens = text((0, 16 * 300))
    save(store, tokens, "a")
    store.flush()
    path, n_tokens = store.match(ROOT, tokens)
    assert n_tokens == 16 * (disk - 1 if disk else ram)
    assert {chunk.id.key for chunk in store.tree} == {chunk.id.key for chunk in path}
    assert store.tree.contexts() == {"a": path[-1].id.key}
    assert load(store, tokens[:32]) == 32
    assert store.stats()["no_room"] > 0


@pytest.mark.parametrize(("ram", "disk"), [(6, 0), (20, 7), (4, 7)])
def test_context_that_outgrows_its_room_keeps_its_beginning(open_store, ram, disk):
    store = open_store(ram, disk)
    save(store, text((0, 64)), "a")
    store.flush()
    tokens = text((0, 16 * 12))
    save(store, tokens, "a")
    store.flush()
    assert store.match(ROOT, tokens).n_tokens == 16 * 6


def test_names_of_shortened_contexts_survive(open_store):
    store = open_store(ram=20, disk=7)
    save(store, text((0, 64)), "a")
    store.flush()
    save(store, text((1000, 64)))
    store.flush()
    heads = store.tree.contexts()
    assert set(heads) == {"a"}
    store = open_store(ram=20, disk=7)
    assert store.tree.contexts() == heads
    assert store.evict_context("a") > 0
    assert store.match(ROOT, text((0, 64))).n_tokens == 0


def test_slab_never_outgrows_its_budget(open_store, tmp_path):
    store = open_store(ram=20, disk=10)
    for i in range(12):
        save(store, text((1000 * i, 16 * (1 + i % 5))))
        store.flush()
        assert (tmp_path / "kv/chunks.slab").stat().st_size <= 10 * PAGE
        assert store.stats()["disk_bytes"] <= store.stats()["disk_budget_bytes"] == 9 * PAGE
    assert store.stats()["disk_evicted"] > 0


def test_smaller_budget_shortens_the_slab(open_store, tmp_path):
    store = open_store(ram=20, disk=50)
    for i in range(5):
        save(store, text((1000 * i, 64)))
        store.flush()
    store = open_store(ram=20, disk=9)
    assert (tmp_path / "kv/chunks.slab").stat().st_size <= 9 * PAGE
    assert 0 < store.stats()["chunks"] <= 8
    for i in range(5):
        load(store, text((1000 * i, 64)))


def test_evicted_context_is_gone_for_good(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    store.flush()
    n_bytes = sum(chunk.size for chunk in store.tree)
    assert store.evict_context("unknown") == 0
    assert store.evict_context("a") == n_bytes
    assert store.evict_context("a") == 0
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 0
    store = open_store(ram=20, disk=50)
    assert (store.stats()["chunks"], store.stats()["contexts"]) == (0, 0)


def test_evicted_context_leaves_what_others_share(open_store):
    store = open_store(ram=20, disk=50)
    a, b = text((0, 32), (100, 32)), text((0, 32), (200, 32))
    save(store, a, "a")
    save(store, b, "b")
    store.flush()
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 6 * PAGE
    store.evict_context("a")
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 4 * PAGE
    assert (load(store, a), load(store, b)) == (32, 64)
    store = open_store(ram=20, disk=50)
    assert (load(store, a), load(store, b)) == (32, 64)


def test_context_that_was_never_flushed_can_be_evicted(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    assert store.evict_context("a") > 0
    store.flush()
    assert store.stats()["disk_bytes"] == store.stats()["chunks"] == 0
    assert store.stats()["written_bytes"] == 0


def test_rewritten_context_gives_up_its_old_end(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    store.flush()
    save(store, text((0, 32), (900, 20)), "a")
    store.flush()
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 4 * PAGE
    assert load(store, text((0, 64))) == 32
    save(store, text((0, 32)), "a")  # shortened to what is stored already
    assert store.stats()["chunks"] == 2


def test_threads_share_a_store(open_store):
    """Four engines save, load and delete the same contexts and never see each other's bytes."""
    store = open_store(ram=12, disk=40)
    contexts = [text((0, 32), (100 * i, 50)) for i in range(5)]
    problems = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for i in rng.integers(0, 5, 150):
                save(store, contexts[i], str(i))
                path, _ = store.match(ROOT, contexts[i])
                addresses = store.reader.fetch(path)
                ready = path[: len(addresses)]
                if rng.random() < 0.3:
                    store.evict_context(str(i))
                for chunk, address in zip(ready, addresses, strict=True):
                    if ctypes.string_at(address, chunk.size) != payload(GEOM, chunk.id):
                        problems.append(chunk)
                store.reader.unpin(ready)
                if rng.random() < 0.3:
                    store.flush()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert all(chunk.pins == 0 for chunk in store.tree)
    store.flush()
    n_pages = sum(-(-chunk.size // PAGE) for chunk in store.tree)
    stats = store.stats()
    assert stats["disk_bytes"] == n_pages * PAGE
    assert stats["ram_bytes"] == sum(PAGE for chunk in store.tree if chunk.ram >= 0)
    assert (stats["faults"], stats["io_errors"]) == (0, 0)
    assert stats["disk_hits"] > 0


# -- faults and failing files -------------------------------------------------------------------


def test_fault_drops_the_chunk_everywhere(open_store):
    store = open_store(ram=20, disk=50)
    tokens = text((0, 64))
    save(store, tokens, "a")
    store.flush()
    path, _ = store.match(ROOT, tokens)
    store.reader.drop_damaged(path[2])
    assert store.stats()["faults"] == 1
    assert load(store, tokens) == 32
    assert store.stats()["disk_bytes"] == store.stats()["ram_bytes"] == 3 * PAGE
    save(store, tokens, "a")
    assert store.stats()["claimed_chunks"] == 5  # only the missing one
    assert load(store, tokens) == 64
    store = open_store(ram=20, disk=50)
    assert load(store, tokens) == 64


def test_damaged_chunk_ends_what_is_loaded(open_store, tmp_path):
    store = open_store(ram=20, disk=50)
    tokens = text((0, 80))
    save(store, tokens)
    store = open_store(ram=20, disk=50)
    path, _ = store.match(ROOT, tokens)
    with (tmp_path / "kv/chunks.slab").open("r+b") as file:
        file.seek(store._residency.disk.file_offset(path[3].disk) + path[3].size // 2)
        file.write(b"\xff\x00\xff\x00")
    assert load(store, tokens) == 48
    assert store.stats()["faults"] == 1
    path, n_tokens = store.match(ROOT, tokens)
    assert [chunk.is_ghost for chunk in path] == [False, False, False, True, False]
    assert n_tokens == 80
    assert load(store, tokens) == 48
    assert store.stats()["faults"] == 1


def test_slab_that_cannot_be_read_is_a_miss(open_store, tmp_path):
    store = open_store(ram=20, disk=50)
    tokens = text((0, 64))
    save(store, tokens)
    store = open_store(ram=20, disk=50)
    with slab_is(store, tmp_path, os.O_RDONLY):  # a directory
        assert load(store, tokens) == 0
    stats = store.stats()
    assert (stats["chunks"], stats["ram_bytes"], stats["disk_bytes"]) == (0, 0, 0)
    assert stats["faults"] == 4


def test_slab_that_stays_unreadable_is_told_once(open_store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    told = "a stored chunk is unusable (EIO)"
    texts = [text((i * 1000, 64)) for i in range(6)]
    store = open_store(ram=60, disk=90)
    for tokens in texts:
        save(store, tokens)
    store = open_store(ram=60, disk=90)
    with slab_is(store, tmp_path, os.O_RDONLY):  # a directory
        assert [load(store, tokens) for tokens in texts[:4]] == [0] * 4
    assert caplog.text.count(told) == 1
    assert load(store, texts[4]) == 64
    assert caplog.text.count("it works again, after 4 failures") == 1
    with slab_is(store, tmp_path, os.O_RDONLY):
        assert load(store, texts[5]) == 0
    assert caplog.text.count(told) == 2


@pytest.mark.parametrize("n", [4, 200])
def test_full_disk_costs_only_recomputing(open_store, n, caplog):
    store = open_store(ram=300, disk=400)
    kept = text((5000, 64))
    save(store, kept, "kept")
    store.flush()
    tokens = text((0, 16 * n))
    save(store, tokens, "a")
    with slab_is(store, "/dev/full", os.O_RDWR):
        store.flush()
    stats = store.stats()
    assert stats["io_errors"] > 0
    assert (stats["chunks"], stats["ram_bytes"], stats["disk_bytes"]) == (4, 4 * PAGE, 4 * PAGE)
    assert "No space left on device; contexts will be recomputed" in caplog.text
    assert (load(store, tokens), load(store, kept)) == (0, 64)
    save(store, tokens, "a")
    store.flush()
    store = open_store(ram=300, disk=400)
    assert (load(store, tokens), load(store, kept)) == (16 * n, 64)


def test_context_ends_where_the_disk_was_full(open_store):
    store = open_store(ram=300, disk=400)
    tokens = text((0, 16 * 150))
    save(store, tokens, "a")
    with files_up_to(100 * PAGE):
        store.flush()
    n_written = 64 * 16  # the first of three batches
    path, n_tokens = store.match(ROOT, tokens)
    assert n_tokens == n_written
    assert store.tree.contexts() == {"a": path[-1].id.key}
    assert store.stats()["ram_bytes"] == store.stats()["disk_bytes"] == 64 * PAGE
    assert load(store, tokens) == n_written


def test_read_only_slab_costs_only_recomputing(open_store, tmp_path):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    with slab_is(store, tmp_path / "kv/chunks.slab", os.O_RDONLY):
        store.flush()
    assert store.stats()["io_errors"] == 1
    assert store.stats()["chunks"] == store.stats()["contexts"] == 0
    save(store, text((0, 64)), "a")
    store = open_store(ram=20, disk=50)
    assert load(store, text((0, 64))) == 64


def log_bytes(store):
    """Return the size of the index's log after it outgrew the slab."""
    log = store._writer.directory / "index.sqlite-wal"
    while log.stat().st_size < 20 * PAGE:
        store.set_layout(bytes(32), "{}")
        store.flush()
    return log.stat().st_size


def test_index_that_cannot_grow_is_written_later(open_store):
    store = open_store(ram=20, disk=50)
    a, b = text((0, 64)), text((1000, 64))
    most = log_bytes(store)
    save(store, a, "a")
    with files_up_to(most):
        store.flush()
    assert store.stats()["io_errors"] == 1
    assert load(store, a) == 64
    save(store, b, "b")
    store = open_store(ram=20, disk=50)
    assert (load(store, a), load(store, b)) == (64, 64)
    assert set(store.tree.contexts()) == {"a", "b"}


def test_failed_deletion_is_told_and_made_up_for(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    save(store, text((1000, 64)), "b")
    store.flush()
    with files_up_to(log_bytes(store)), pytest.raises(StoreError, match="KV store's index: "):
        store.evict_context("a")
    assert store.match(ROOT, text((0, 64))).n_tokens == 0
    store = open_store(ram=20, disk=50)
    assert set(store.tree.contexts()) == {"b"}
    assert store.stats()["chunks"] == 4


def test_layout_that_cannot_be_written_is_known_and_written_later(open_store):
    store = open_store(ram=20, disk=50)
    with files_up_to(log_bytes(store)):
        store.set_layout(ROOT, "{}")
        store.flush()
    assert store.stats()["io_errors"] == 1
    assert store.layout(ROOT) == "{}"
    store = open_store(ram=20, disk=50)  # closing tried again
    assert store.layout(ROOT) == "{}"


def test_store_closes_even_when_nothing_can_be_written(open_store, tmp_path):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with files_up_to(2 * PAGE):
        store.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    assert load(store, text((0, 64))) == 64


def test_closed_store_is_quiet(open_store):
    store = open_store(ram=20, disk=50)
    save(store, text((0, 64)), "a")
    store.close()
    store.close()
    store.flush()
    store.set_layout(ROOT, "{}")
    assert store.layout(ROOT) == "{}"
    assert store.evict_context("a") > 0
    assert store.stats()["store"] is None


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


def test_a_full_disk_is_told_once_then_counted(open_store, monkeypatch, caplog):
    store, whole = open_store(ram=64, disk=64), _native.store_write

    def full(*_):
        raise StoreError("No space left on device")

    def lines():
        return [line.getMessage() for line in caplog.records if "No space" in line.getMessage()]

    monkeypatch.setattr(_native, "store_write", full)
    for n in range(5):
        save(store, text((1000 * n, 64)))
        store.flush()
    assert len(lines()) == 1
    assert "the next failures are only counted" in lines()[0]
    assert store.stats()["io_errors"] == 5
    monkeypatch.setattr(_native, "store_write", whole)
    save(store, text((9000, 64)))
    store.flush()
    monkeypatch.setattr(_native, "store_write", full)
    save(store, text((10000, 64)))
    store.flush()
    assert len(lines()) == 2
