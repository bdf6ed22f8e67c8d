"""Damaged chunks, and disks that are full or fail, cost no more than recomputing."""

from __future__ import annotations

import logging
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from damages import overwrite
from page_stores import ROOT, load, save, text

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.extents import PAGE


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
    middle = store._residency.disk.file_offset(path[3].disk) + path[3].size // 2
    overwrite(tmp_path / "kv/chunks.slab", middle, b"\xff\x00\xff\x00")
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
    told = "a stored chunk is unusable: it cannot be read; its tokens are recomputed;"
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
    assert "further failures are only counted" in lines()[0]
    assert store.stats()["io_errors"] == 5
    monkeypatch.setattr(_native, "store_write", whole)
    save(store, text((9000, 64)))
    store.flush()
    monkeypatch.setattr(_native, "store_write", full)
    save(store, text((10000, 64)))
    store.flush()
    assert len(lines()) == 2


def test_full_disk_still_has_the_places_of_replaced_chunks(open_store, tmp_path):
    store = open_store(ram=100, disk=4000)
    for i in range(60):  # the slab becomes much larger than the index
        save(store, text((50_000 + 100 * i, 16)))
    save(store, text((0, 320)), "a")
    store.flush()
    kept = []
    with files_up_to((tmp_path / "kv/chunks.slab").stat().st_size):
        for i in range(1, 9):
            tokens = text((1000 * i, 320))
            store.drop_replaced_tail("a", chain(ROOT, tokens))
            save(store, tokens, "a")
            store.flush()
            kept.append(store.match(ROOT, tokens).n_tokens)
    assert kept == [320] * 8
