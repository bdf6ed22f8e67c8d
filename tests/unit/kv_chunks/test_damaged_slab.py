"""Damaged slabs: what is whole is used, the rest is a miss, and the store goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from damages import FOREIGN, content, each, flip_at_random, overwrite
from kv_stores import (
    BUDGET,
    A,
    B,
    assert_miss,
    assert_works,
    edit,
    load,
    loaded,
    open_store,
    save,
)

from llmaas_plugins.kv_chunks.store.extents import PAGE


@pytest.fixture
def slab(kv):
    return kv / "chunks.slab"


def test_untouched_copy_is_whole(kv):
    store = open_store(kv)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    assert store.stats()["faults"] == 0
    store.close()


@pytest.mark.parametrize("n_bytes", [PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 2000, 8 * PAGE + 700])
def test_truncated_slab_keeps_what_is_left(kv, slab, n_bytes):
    os.truncate(slab, n_bytes)
    store = open_store(kv)
    n_whole = max(0, n_bytes // PAGE - 1)
    assert load(store, A) in {16 * n_whole, len(A)}
    assert store.stats()["faults"] > 0
    store.close()
    assert_works(kv)


def test_slab_that_ends_with_its_last_payload_is_whole(kv, slab):
    store = open_store(kv)
    last = max(store.tree, key=lambda chunk: chunk.disk)
    end = store._residency.disk.file_offset(last.disk) + last.size
    store.close()
    os.truncate(slab, end)
    assert loaded(kv) == (len(A), len(B))


@each({**FOREIGN, "magic": content(b"LLMAASKV" * PAGE), "missing": Path.unlink})
def test_slab_of_another_kind_is_a_miss(kv, slab, damage, caplog):
    damage(slab)
    assert_miss(kv)
    assert "starting an empty one. Contexts will be recomputed" in caplog.text


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"LLMBBSKV"), (8, b"\xff" * 4), (12, b"z" * 16)],
    ids=["magic", "impossible format", "another store"],
)
def test_other_header_is_a_miss(kv, slab, at, value, caplog):
    overwrite(slab, at, value)
    assert_miss(kv)
    assert "the slab's header does not belong to the index" in caplog.text
    assert (kv / "index.sqlite.unusable").exists()


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_in_the_slab_cost_only_their_chunks(kv, slab, seed):
    flip_at_random(slab, seed, 4, first=PAGE)
    store = open_store(kv)
    load(store, A)
    load(store, B)
    assert 0 <= store.stats()["faults"] <= 4
    store.close()
    assert_works(kv)


def test_swapped_extents_are_told_by_their_keys(kv, slab):
    whole = slab.read_bytes()
    overwrite(slab, PAGE, whole[2 * PAGE : 3 * PAGE] + whole[PAGE : 2 * PAGE])
    store = open_store(kv)
    assert load(store, A) == 0
    assert store.stats()["faults"] == 2
    store.close()
    assert_works(kv)


def test_slab_and_index_of_two_stores_do_not_mix(kv, slab, tmp_path):
    store = open_store(tmp_path / "other")
    save(store, B, "b")
    store.close()
    (tmp_path / "other/chunks.slab").replace(slab)
    assert_miss(kv)


@pytest.mark.parametrize("column", ["offset", "size"])
def test_chunks_in_a_slab_of_a_thousand_gigabytes_cost_no_memory(kv, slab, column):
    os.truncate(slab, 1 << 40)  # a hole
    edit(kv, f"UPDATE chunks SET {column} = 1 << 39 WHERE offset = 0")
    store = open_store(kv)
    assert slab.stat().st_size <= BUDGET
    assert load(store, A) == 0
    store.close()
    assert_works(kv)
