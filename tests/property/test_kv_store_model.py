"""The store against a dictionary: loaded bytes equal saved bytes, whatever happens in between."""

from __future__ import annotations

import collections
import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stored_chunks import encoder, payload

from llmaas_plugins._native import (
    Budget,
    Codec,
    KVGeometry,
    chunk_bound,
)
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (128,), (128,))  # a full chunk is two pages
BOUND = chunk_bound(GEOM, Codec.RAW, 16)
RAM, DISK = 11 * PAGE, 24 * PAGE
MOST_TOKENS = 200

runs = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([48, 3, 16, 20, 64])), min_size=1, max_size=3
)
which = st.integers(0, 5)
shares = st.sampled_from([1, 0.7, 0.3])
names = st.sampled_from([None, "a", "b", "c"])


class Store(RuleBasedStateMachine):
    """Saves, loads and evictions of contexts, with RAM and disk too small for all of them."""

    directory = None  # set by the test
    disk_bytes = DISK
    opened = itertools.count()

    def __init__(self):
        super().__init__()
        self.path = self.directory / str(next(self.opened))
        self.pinned = []
        self.texts = []
        self.open()

    def open(self):
        disk = DiskStore(self.path, self.disk_bytes) if self.disk_bytes else None
        self.budget = Budget(RAM)
        self.store = ChunkStore(self.budget, disk)

    def on_disk(self):
        return {chunk.id: (chunk.disk, chunk.size) for chunk in self.store.tree if chunk.disk >= 0}

    def earlier(self, i, share):
        """Return the beginning of a text that was saved before."""
        text = self.texts[-1 - i % len(self.texts)] if self.texts else np.zeros(0, np.int32)
        return text[: round(len(text) * share)]

    @rule(i=which, share=shares, more=runs, name=names)
    def save(self, i, share, more, name):
        more = np.repeat(*np.array(more, np.int32).T)
        kept = self.earlier(i, share) if i else []
        tokens = np.concatenate([kept, more])[:MOST_TOKENS].astype(np.int32)
        self.texts.append(tokens)
        ids = chain(ROOT, tokens)
        for k in self.store.missing(ids):
            if not self.store.put(ids[k], BOUND, encoder(GEOM, ids[k]), is_first=k == 0):
                break
        self.store.touch(ids)
        if name is not None:
            self.store.set_head(name, ids)

    @precondition(lambda self: self.texts)
    @rule(i=which, share=shares, hold=st.booleans())
    def load(self, i, share, hold):
        path, _ = self.store.match(ROOT, self.earlier(i, share))
        addresses = self.store.reader.fetch(path)
        assert len(addresses) <= len(path)
        self.pinned.append((path[: len(addresses)], addresses))
        self.check_pinned()
        if not hold or len(self.pinned) > 2:
            self.release()

    @precondition(lambda self: self.pinned)
    @rule()
    def release(self):
        self.check_pinned()
        self.store.reader.unpin(self.pinned.pop(0)[0])

    def check_pinned(self):
        for chunks, addresses in self.pinned:
            for chunk, address in zip(chunks, addresses, strict=True):
                assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)

    @rule()
    def flush(self):
        self.store.flush()
        if self.disk_bytes:
            assert set(self.on_disk()) == {chunk.id for chunk in self.store.tree}

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def evict(self, name):
        n_bytes = sum(chunk.size for chunk in self.store.tree)
        freed = self.store.evict_context(name)
        assert name not in self.store.tree.contexts()
        assert sum(chunk.size for chunk in self.store.tree) == n_bytes - freed

    @rule(owner=st.integers(0, 1), n_pages=st.integers(0, RAM // PAGE))
    def lend(self, owner, n_pages):
        lent = self.store.space.lend(owner, n_pages * PAGE)
        assert 0 <= lent <= n_pages * PAGE
        if lent < n_pages * PAGE:  # nothing more could be evicted
            assert self.stats("ram_bytes") + self.stats("lent_bytes") == RAM

    def stats(self, name):
        return self.store.stats()[name]

    @rule(in_order=st.booleans())
    def reopen(self, in_order):
        while self.pinned:
            self.release()
        self.store.flush()
        before, heads = self.on_disk(), self.store.tree.contexts()
        if in_order or not self.disk_bytes:
            self.store.close()
        else:  # as if the process had died
            self.store._writer.close()
        self.open()
        assert self.on_disk() == before
        assert self.store.tree.contexts() == (heads if self.disk_bytes else {})
        assert self.store.stats()["faults"] == 0

    @invariant()
    def budgets_hold_and_are_accounted_for(self):
        assert self.budget.used == self.budget.limit == RAM
        held = {chunk for chunks, _ in self.pinned for chunk in chunks}
        in_ram = {chunk for chunk in self.store.tree if chunk.ram >= 0} | held
        stats = self.store.stats()
        assert stats["ram_bytes"] == sum(page_round(chunk.size) for chunk in in_ram) <= RAM
        assert stats["ram_bytes"] + stats["lent_bytes"] <= RAM
        active = sum(page_round(chunk.size) for chunk in self.store.tree if chunk.used)
        assert self.store.space.lendable(None) == RAM - active - stats["lent_bytes"]
        on_disk = sum(page_round(size) for _, size in self.on_disk().values())
        assert stats["disk_bytes"] == on_disk
        if self.disk_bytes:
            assert (self.path / "chunks.slab").stat().st_size <= self.disk_bytes

    @invariant()
    def only_what_is_held_is_pinned(self):
        held = collections.Counter(chunk for chunks, _ in self.pinned for chunk in chunks)
        assert all(chunk.pins == held[chunk] for chunk in {*self.store.tree, *held})

    @invariant()
    def every_chunk_can_be_reached(self):
        keys = {ROOT, *(chunk.id.key for chunk in self.store.tree)}
        assert all(chunk.id.parent in keys for chunk in self.store.tree)
        assert set(self.store.tree.contexts().values()) <= keys
        assert all(chunk.ram >= 0 or chunk.disk >= 0 for chunk in self.store.tree)

    def teardown(self):
        self.store.close()


class RamOnly(Store):
    disk_bytes = 0


LIMITS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_store_is_a_dictionary_with_a_bad_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "directory", tmp_path)
    run_state_machine_as_test(Store, settings=LIMITS)


def test_store_without_disk_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "directory", tmp_path)
    run_state_machine_as_test(RamOnly, settings=LIMITS)
