"""Transfers of other threads end in a forked child, which gets back the memory that they held."""

from __future__ import annotations

import contextlib
import threading

import pytest
from forking import in_child
from kv_stores import BUDGET, ROOT, A, load, open_store, save, write_store

from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on


@pytest.fixture(params=["RAM alone", "with a disk"])
def store(request, tmp_path):
    """Return a store that holds the context "a" of the tokens A."""
    opened = (
        ChunkStore(Budget(BUDGET), None) if request.param == "RAM alone" else open_store(tmp_path)
    )
    with contextlib.closing(opened):
        save(opened, A, "a")
        yield opened


class Held:
    """A point where a thread waits: it tells that it is there, and goes on when told."""

    def __init__(self):
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.is_there.set()
        assert self.may_go_on.wait(20)


@contextlib.contextmanager
def running(work):
    """Run ``work(held)`` on another thread, which calls ``held`` once, while the block runs."""
    held = Held()
    thread = threading.Thread(target=work, args=(held,))
    thread.start()
    try:
        assert held.is_there.wait(20)
        yield
    finally:
        held.may_go_on.set()
        thread.join()


def transfer(store, held):
    """Use the chunks of A on this thread."""
    path, _ = store.match(ROOT, A)
    assert len(store.reader.fetch(path)) == len(path)
    held()
    store.reader.unpin(path)


def all_is_free(store):
    """Evict everything that can be evicted; return whether the whole RAM tier is free then."""
    return store.space.reserve(store.space.capacity) is not None


def test_chunks_that_another_thread_pinned_can_be_evicted(store):
    with running(lambda held: transfer(store, held)):
        assert not all_is_free(store)  # in this process they are in use
        assert in_child(lambda: _assert_unpinned(store)) == 0
    assert load(store, A) == len(A)
    assert all(chunk.pins == 0 for chunk in store.tree)


def _assert_unpinned(store):
    assert all(chunk.pins == 0 for chunk in store.tree)
    assert all_is_free(store)


def test_chunks_that_the_forking_thread_pinned_stay(store):
    path, _ = store.match(ROOT, A)
    store.reader.fetch(path)

    def child():
        assert [chunk.pins for chunk in path] == [1] * len(path)
        assert not all_is_free(store)
        store.reader.unpin(path)
        assert all_is_free(store)

    assert in_child(child) == 0
    store.reader.unpin(path)


def test_transfers_may_end_in_any_order(store):
    path, _ = store.match(ROOT, A)
    for part in (path, path[:2], path[1:]):
        store.reader.fetch(part)
    for part in (path, path[1:], path[:2]):
        assert not all_is_free(store)
        store.reader.unpin(part)
    assert all(chunk.pins == 0 for chunk in path)
    assert all_is_free(store)


def test_chunks_that_were_dropped_in_use_are_freed(store):
    def child():
        assert all_is_free(store)

    with running(lambda held: transfer(store, held)):
        store.evict_context("a")
        assert in_child(child) == 0
    assert all_is_free(store)


def test_space_for_a_chunk_that_another_thread_encodes(store):
    def child():
        assert all_is_free(store)

    def put(held):
        def encode(_):
            held()
            raise InterruptedError

        with contextlib.suppress(InterruptedError):
            store.put(chain(ROOT, A + 1)[0], BUDGET // 2, encode, is_first=True)

    with running(put):
        assert in_child(child) == 0
    assert all_is_free(store)


def test_space_for_chunks_that_another_thread_reads(tmp_path, monkeypatch):
    read = _native.store_read

    def child():
        assert all_is_free(store)

    def held_read(held):
        def store_read(*args, **kwargs):
            held()
            return read(*args, **kwargs)

        monkeypatch.setattr(_native, "store_read", store_read)
        assert load(store, A) == len(A)

    with contextlib.closing(open_store(write_store(tmp_path))) as store:
        with running(held_read):
            assert in_child(child) == 0
        assert all(chunk.pins == 0 for chunk in store.tree)
        assert all_is_free(store)
