"""The slab's index: committed rows are read back, and invalid ones are refused."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from llmaas_plugins.kv_chunks.store import index as index_module
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.index import ChunkIndex, ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

STORE = b"s" * 16
ROOT = bytes(32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.sqlite"


@pytest.fixture
def index(path):
    index = ChunkIndex(path, STORE)
    yield index
    index.close()


def rows(n):
    ids = chain(ROOT, np.arange(16 * n, dtype=np.int32))
    return [ChunkRow(wanted, 4096 * i, 100 + i) for i, wanted in enumerate(ids)]


def added(*found):
    return {row.id.key: row for row in found}


def used(*found):
    return {row.id.key: None for row in found}


def edit(path, *statements):
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def test_everything_comes_back(index, path):
    a, b, c = rows(3)
    index.apply(
        IndexUpdate(added(a, b, c), used=used(c, b, a), heads={"x": c.id.key, "ü ": a.id.key})
    )
    index.apply(IndexUpdate(layouts={ROOT: '{"n_layer": 2}'}))
    index.close()
    again = ChunkIndex(path, b"t" * 16)
    assert again.store_id() == STORE
    assert list(again.chunks()) == [c, b, a]
    assert again.contexts() == {"x": c.id.key, "ü ": a.id.key}
    assert again.layout(ROOT) == '{"n_layer": 2}'
    assert again.layout(b"other") is None
    again.close()


def test_layouts_without_chunks_go_if_there_are_many(index, monkeypatch):
    monkeypatch.setattr(index_module, "_MOST_LAYOUTS", 3)
    index.apply(IndexUpdate(added(*rows(1)), layouts={ROOT: "kept"}))
    for name in (b"a", b"b", b"c"):  # roots of apps, which clients may name
        index.apply(IndexUpdate(layouts={name * 32: "unused"}))
    assert set(index.layouts()) == {ROOT, b"c" * 32}
    assert index.layout(ROOT) == "kept"


def test_only_the_ends_of_contexts_that_changed_are_written(index):
    a, b, c = rows(3)
    before = {str(i): a.id.key for i in range(100)}
    index.apply(IndexUpdate(added(a, b, c), heads=before))
    after = before | {"1": b.id.key, "new": c.id.key}
    del after["2"]
    statements = []
    index._db.set_trace_callback(statements.append)
    index.apply(IndexUpdate(heads=after, heads_before=before))
    index._db.set_trace_callback(None)
    assert sum("contexts" in one for one in statements) == 3
    assert index.contexts() == after


def test_new_index_is_empty(index):
    assert list(index.chunks()) == []
    assert index.contexts() == {}
    assert index.layout(ROOT) is None


def test_order_of_use_goes_on_from_one_commit_to_the_next(index):
    a, b, c = rows(3)
    index.apply(IndexUpdate(added(a, b, c), used=used(a, b, c)))
    index.apply(IndexUpdate(used=used(b)))
    index.apply(IndexUpdate(used=used(a)))
    assert list(index.chunks()) == [c, b, a]


def test_removed_chunks_are_gone_and_may_come_back_elsewhere(index):
    a, b = rows(2)
    index.apply(IndexUpdate(added(a, b)))
    moved = b._replace(offset=1 << 20, size=7)
    index.apply(IndexUpdate(added(moved), [a.id.key, b.id.key]))
    assert list(index.chunks()) == [moved]


def test_contexts_change_only_when_told(index):
    (a,) = rows(1)
    index.apply(IndexUpdate(heads={"x": a.id.key, "y": a.id.key}))
    index.apply(IndexUpdate(added(a)))
    assert set(index.contexts()) == {"x", "y"}
    index.apply(IndexUpdate(heads={"y": a.id.key}))
    assert set(index.contexts()) == {"y"}
    index.apply(IndexUpdate(heads={}))
    assert index.contexts() == {}


def test_geometry_is_replaced(index):
    index.apply(IndexUpdate(layouts={ROOT: "old"}))
    index.apply(IndexUpdate(layouts={ROOT: "new"}))
    assert index.layout(ROOT) == "new"


def test_failed_commit_changes_nothing(index):
    a, b = rows(2)
    index.apply(IndexUpdate(added(a), heads={"x": a.id.key}))
    wrong = IndexUpdate(added(b), [a.id.key], heads={"x": None})
    with pytest.raises(sqlite3.IntegrityError):
        index.apply(wrong)
    assert list(index.chunks()) == [a]
    assert index.contexts() == {"x": a.id.key}
    index.apply(IndexUpdate(added(b)))
    assert len(list(index.chunks())) == 2


def test_two_updates_are_as_good_as_one(tmp_path):
    """A failed update is committed with the next one."""
    a, b, c, d = rows(4)
    moved = b._replace(offset=1 << 20)
    first = IndexUpdate(
        added(a, b, c), used=used(c, b, a), heads={"x": c.id.key}, layouts={ROOT: "1", c.id.key: ""}
    )
    second = IndexUpdate(
        added(moved, d), [b.id.key, c.id.key], used(d, c, moved), layouts={ROOT: "2"}
    )
    contents = []
    for name, updates in (("two", [first, second]), ("one", [first.merged_with(second)])):
        index = ChunkIndex(tmp_path / name, STORE)
        for update in updates:
            index.apply(update)
        contents.append((list(index.chunks()), index.contexts(), index.layouts()))
        index.close()
    assert contents[0] == contents[1] == ([a, d, moved], {"x": c.id.key}, {ROOT: "2", c.id.key: ""})


@pytest.mark.parametrize("version", [0, FORMAT - 1, FORMAT + 1, -1, 2**31 - 1])
def test_other_formats_are_refused_and_left_as_they_are(index, path, version):
    index.apply(IndexUpdate(added(*rows(2))))
    index.close()
    edit(path, f"PRAGMA user_version={version}")
    with pytest.raises(sqlite3.DatabaseError, match=f"index format {version}, expected {FORMAT}"):
        ChunkIndex(path, STORE)
    edit(path, f"PRAGMA user_version={FORMAT}")
    again = ChunkIndex(path, STORE)
    assert len(list(again.chunks())) == 2
    again.close()


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 8176])
def test_garbage_is_refused(path, content):
    path.write_bytes(content * 20)
    with pytest.raises(sqlite3.DatabaseError, match="file is not a database"):
        ChunkIndex(path, STORE)


def test_damaged_pages_are_refused(index, path):
    index.apply(IndexUpdate(added(*rows(500))))
    index.close()
    whole = bytearray(path.read_bytes())
    whole[8192:24576] = b"\xa5" * 16384
    path.write_bytes(whole)
    with pytest.raises(sqlite3.DatabaseError, match=r"damaged|malformed"):
        ChunkIndex(path, STORE)


def test_half_made_index_is_made_again(path):
    """The process died before the schema was committed."""
    sqlite3.connect(path).close()
    index = ChunkIndex(path, STORE)
    assert index.store_id() == STORE
    index.close()


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER DELETE ON chunks BEGIN DELETE FROM contexts; END",
        "CREATE VIEW v AS SELECT * FROM chunks",
        "CREATE INDEX i ON chunks (used)",
        "CREATE TABLE more (id BLOB)",
        "ALTER TABLE chunks ADD COLUMN more",
    ],
)
def test_tables_of_another_shape_are_refused(index, path, statement):
    index.close()
    edit(path, statement)
    with pytest.raises(sqlite3.DatabaseError, match="its tables are not those of a store"):
        ChunkIndex(path, STORE)
    with pytest.raises(sqlite3.DatabaseError, match="its tables are not those of a store"):
        ChunkIndex.read_only(path)


def test_reading_changes_no_byte_and_sees_what_is_committed(index, path):
    a, b, _ = rows(3)
    index.apply(IndexUpdate(added(a), heads={"x": a.id.key}))
    reader = ChunkIndex.read_only(path)  # from the log
    index.apply(IndexUpdate(added(b)))
    assert {row.id.key for row in reader.chunks()} == {a.id.key, b.id.key}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.apply(IndexUpdate(removed=[a.id.key]))
    reader.close()
    index.close()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    reader = ChunkIndex.read_only(path)
    assert (len(list(reader.chunks())), reader.contexts()) == (2, {"x": a.id.key})
    reader.close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_rows_of_another_shape_are_counted_and_dropped(index, path):
    index.apply(IndexUpdate(added(*rows(3))))
    for column, size in (("parent", 31), ("tokens", 68)):
        index._db.execute(
            f"UPDATE chunks SET {column} = zeroblob({size}) WHERE offset = {size // 68 * 4096}"
        )
    assert index.n_malformed() == 2
    assert len(list(index.chunks())) == 1
    assert (index.drop_malformed(), index.drop_malformed()) == (2, 0)
    assert len(list(index.chunks())) == 1


def test_what_was_deleted_is_in_no_file(index, path):
    a, b = rows(2)
    index.apply(IndexUpdate(added(a, b), heads={"secret name": b.id.key}))
    index.apply(IndexUpdate(removed=[b.id.key], heads={}))
    index.end_erasing()
    left = b"".join(file.read_bytes() for file in path.parent.iterdir() if "shm" not in file.name)
    assert a.id.tokens in left
    assert b.id.tokens not in left
    assert b"secret name" not in left
