"""Damaged indexes: rows that are right are used, the rest is a miss, and the store goes on."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from damages import FOREIGN, content, each, flip_at_random
from kv_stores import (
    ROOT,
    A,
    B,
    assert_miss,
    assert_works,
    edit,
    load,
    loaded,
    open_store,
)

from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.store_format import FORMAT


@pytest.mark.parametrize("version", [2**31 - 1, -(2**31)])
def test_index_of_an_impossible_format_is_a_miss(kv, version, caplog):
    edit(kv, f"PRAGMA user_version={version}")
    assert_miss(kv)
    assert f"index format {version}, expected {FORMAT}" in caplog.text


GARBAGE = {**FOREIGN, "magic": content(b"SQLite format 3\0" + b"\xff" * 9000)}


@each(GARBAGE, but=["empty", "one byte"])  # SQLite starts anew in these files
def test_index_of_garbage_is_a_miss(kv, damage):
    damage(kv / "index.sqlite")
    garbage = (kv / "index.sqlite").read_bytes()
    assert_miss(kv)
    assert (kv / "index.sqlite.unusable").read_bytes() == garbage


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
@each(FOREIGN)
def test_garbage_beside_the_index_does_no_harm(kv, name, damage):
    damage(kv / name)
    assert loaded(kv) == (len(A), len(B))
    assert_works(kv)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 5000, 8192])
def test_truncated_index_is_a_miss(kv, size):
    os.truncate(kv / "index.sqlite", size)
    assert_miss(kv)


@pytest.mark.parametrize("seed", range(16))
def test_flipped_bits_in_the_index_give_no_wrong_cells(kv, seed):
    flip_at_random(kv / "index.sqlite", seed, 3)
    loaded(kv)
    assert_works(kv)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE chunks",
        "DROP TABLE contexts",
        "DROP TABLE geometry",
        "DROP TABLE store",
        "DELETE FROM store",
        "INSERT INTO store SELECT id FROM store",
        "UPDATE store SET id = 'text'",
        "UPDATE store SET id = 7",
        "ALTER TABLE chunks RENAME COLUMN size TO length",
        "UPDATE chunks SET used = 'soon'",
        "UPDATE chunks SET used = 9223372036854775807",
        "UPDATE chunks SET key = 1 << 50 WHERE size = (SELECT min(size) FROM chunks)",
        "UPDATE chunks SET tokens = 1 << 50",
        "UPDATE chunks SET parent = 'parent'",
        "UPDATE chunks SET offset = 'there'",
        "UPDATE chunks SET size = 1234.5",
        "UPDATE chunks SET size = x'00'",
    ],
)
def test_index_with_other_contents_is_a_miss(kv, statement):
    edit(kv, statement)
    assert_miss(kv)


@pytest.mark.parametrize(
    "change",
    [
        "offset = -4096",
        "offset = 100",
        "offset = 1 << 40",
        "offset = 9223372036854775807",
        "size = 0",
        "size = -5",
        "size = 9223372036854775807",
        "size = size + 4096",
        "tokens = x'00'",
        "tokens = x''",
        "tokens = zeroblob(64)",
        "tokens = zeroblob(68)",
        "parent = zeroblob(32)",
        "parent = x''",
        "key = zeroblob(32)",
        "key = x''",
    ],
)
def test_rows_that_cannot_be_right_are_dropped(kv, change):
    wanted = chain(ROOT, A)[3]
    edit(kv, (f"UPDATE chunks SET {change} WHERE key = ?", (wanted.key,)))
    store = open_store(kv)
    assert (load(store, A), load(store, B)) == (48, len(B))
    assert store.stats()["faults"] == 1
    store.close()
    store = open_store(kv)
    assert store.stats()["faults"] == 0  # the row is gone
    store.close()
    assert_works(kv)


def test_overlapping_rows_are_not_both_believed(kv):
    first, second = chain(ROOT, A)[3], chain(ROOT, B)[3]
    place = "(SELECT offset FROM chunks WHERE key = ?)"
    edit(kv, (f"UPDATE chunks SET offset = {place} WHERE key = ?", (first.key, second.key)))
    store = open_store(kv)
    assert store.stats()["faults"] == 1
    assert load(store, B) == 48
    assert load(store, A) in {48, len(A)}
    store.close()
    assert_works(kv)


@pytest.mark.parametrize("size", ["size - 1", "size - 30", "1", "size + 1"])
def test_wrong_size_is_found_when_the_chunk_is_read(kv, size):
    edit(kv, (f"UPDATE chunks SET size = {size} WHERE key = ?", (chain(ROOT, A)[3].key,)))
    store = open_store(kv)
    assert load(store, A) == 48
    assert store.stats()["faults"] == 1
    store.close()
    assert_works(kv)


def test_changed_tokens_do_not_lend_their_cells_to_other_text(kv):
    ids = chain(ROOT, A)
    other = A.copy()
    other[70] += 1
    edit(kv, ("UPDATE chunks SET tokens = ? WHERE key = ?", (other[64:80].tobytes(), ids[4].key)))
    store = open_store(kv)
    assert (load(store, other), load(store, A)) == (64, 64)
    store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE contexts SET head = 1 << 50",
        "UPDATE contexts SET head = 'text'",
        "UPDATE contexts SET head = zeroblob(32)",
        "UPDATE contexts SET id = CAST(x'ff' || id AS TEXT)",
        "UPDATE geometry SET layout = CAST(x'ff00' AS TEXT)",
        "UPDATE geometry SET layout = 5",
        "DELETE FROM geometry",
        "DELETE FROM contexts",
    ],
)
def test_other_tables_do_not_endanger_the_chunks(kv, statement):
    edit(kv, statement)
    store = open_store(kv)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    assert store.layout(ROOT) is None or isinstance(store.layout(ROOT), str)
    store.evict_context("a")
    store.close()
    assert_works(kv)


def test_index_of_other_contexts_finds_nothing(kv):
    store = open_store(kv)
    assert store.match(b"q" * 32, A) == ([], 0)
    store.close()


# -- rows that would take much memory ------------------------------------------------------------


@pytest.mark.parametrize("column", ["key", "parent", "tokens"])
def test_huge_names_are_not_read_into_memory(kv, column):
    wanted = chain(ROOT, A)[3]
    edit(kv, (f"UPDATE chunks SET {column} = zeroblob(20000000) WHERE key = ?", (wanted.key,)))
    tracemalloc.start()
    store = open_store(kv)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert (load(store, A), store.stats()["faults"]) == (48, 1)
    store.close()
    assert_works(kv)


def test_huge_names_of_contexts_and_layouts_are_left_out(kv):
    edit(
        kv,
        "UPDATE contexts SET id = printf('%.*c', 9000000, 'x') WHERE id = 'a'",
        "UPDATE geometry SET layout = printf('%.*c', 9000000, 'x')",
    )
    store = open_store(kv)
    assert set(store.tree.contexts()) == {"b"}
    assert store.layout(ROOT) is None
    assert load(store, A) == len(A)
    store.close()
