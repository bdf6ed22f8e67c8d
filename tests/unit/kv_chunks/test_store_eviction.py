"""Eviction: contexts are shortened from their end, and deleted contexts are gone."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from page_stores import GEOM, ROOT, load, save, text
from stored_chunks import payload

from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.tree import names_of


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


def test_a_context_with_shortened_prompts_is_one(open_store):
    store = open_store(ram=20)
    whole, shortened = names_of("a")
    save(store, text((0, 64)), shortened)
    assert len(store.stored("a").tokens) == 64
    assert store.stats()["contexts"] == 1
    for n_tokens, longest in ((32, 64), (96, 96)):
        save(store, text((1000, n_tokens)), whole)
        assert len(store.stored("a").tokens) == longest
        assert store.stats()["contexts"] == 1
    store.evict_context("a")
    assert (store.stored("a"), store.stats()["contexts"]) == (None, 0)


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


@pytest.mark.slow
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
