"""A deletion from an SQLite file leaves no byte in it, wherever SQLite has copies."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3

import numpy as np
import pytest
from interrupting import interruptions
from soak import scale

from llmaas_hooks import StoreError
from llmaas_plugins.files import sqlite_erasing
from llmaas_plugins.files.sqlite_erasing import Eraser, connect
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.index import ChunkIndex, ChunkRow, IndexUpdate
from llmaas_plugins.service.context_log import ContextLog, ContextRecord


def left_in(folder, texts):
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    return [text for text in texts if text in data]


@pytest.mark.parametrize("seed", [14, *range(scale(1, 40))])
def test_texts_that_grow_and_go_leave_nothing(tmp_path, seed):
    """SQLite moves rows from page to page meanwhile."""
    rng, log, alive = random.Random(seed), ContextLog(tmp_path), []
    for i in range(scale(400, 2000)):
        roll = rng.random()
        if roll < 0.45 or not alive:
            alive.append(ContextRecord(f"context-{i}", rng.choice("abc")))
            assert log.add(alive[-1], 1000)
        elif roll < 0.75:
            record = rng.choice(alive)
            text = f"secret of {record.id}. " * rng.choice([1, 2, 3, 40])
            record.messages = [*record.messages, {"role": "user", "content": text}]
            assert log.update(record)
        else:
            record = alive.pop(rng.randrange(len(alive)))
            assert log.delete(record.id, record.app)
            log.erase()
            log.end_deletion(record.id)
            assert left_in(tmp_path, [f"secret of {record.id}.".encode()]) == []
    assert [found.id for found in log.of_all()] == [record.id for record in alive]
    log.close()


@pytest.mark.parametrize("seed", [1, *range(scale(0, 40))])
def test_chunks_that_come_and_go_leave_nothing(tmp_path, seed):
    rng, alive = np.random.default_rng(seed), []
    index = ChunkIndex(tmp_path / "index.sqlite", os.urandom(16))
    for _ in range(scale(60, 300)):
        if rng.random() < 0.6 or not alive:
            tokens = rng.integers(0, 2**31 - 1, rng.integers(1, 25) * 16).astype(np.int32)
            alive.append(chain(b"r" * 32, tokens))
            rows = {one.key: ChunkRow(one, 0, 4096) for one in alive[-1]}
            index.apply(IndexUpdate(added=rows, used=dict.fromkeys(rows)))
        else:
            gone = alive.pop(rng.integers(len(alive)))
            index.apply(IndexUpdate(removed=[one.key for one in gone], erases=True))
            index.end_erasing()
            assert left_in(tmp_path, [part for one in gone for part in (one.key, one.tokens)]) == []
    assert {row.id for row in index.chunks()} == {one for ids in alive for one in ids}
    index.close()


def test_a_writer_in_between_costs_another_try(tmp_path, monkeypatch):
    db, other = (connect(tmp_path / "db") for _ in range(2))
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE texts (text)")
    eraser, waits = Eraser(db, tmp_path / "db"), [3]
    empty = eraser._empty_log

    def empty_and_write():
        empty()
        if waits[0]:
            waits[0] -= 1
            other.execute("INSERT INTO texts VALUES ('more')")

    monkeypatch.setattr(eraser, "_empty_log", empty_and_write)
    eraser.erase()
    waits[0] = 100
    with pytest.raises(StoreError, match="it is changed meanwhile"):
        eraser.erase()
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for one in (db, other, eraser):
        one.close()


def test_a_file_whose_pages_cannot_be_told_apart_is_left_alone(tmp_path):
    db = connect(tmp_path / "db")
    db.execute("PRAGMA auto_vacuum=FULL")
    db.execute("CREATE TABLE texts (text)")
    eraser = Eraser(db, tmp_path / "db")
    before = (tmp_path / "db").read_bytes()
    with pytest.raises(StoreError, match="auto_vacuum"):
        eraser.erase()
    assert (tmp_path / "db").read_bytes() == before
    eraser.close()
    db.close()


def test_a_schema_that_is_no_text_is_damage(tmp_path):
    path = tmp_path / "db.sqlite"
    with contextlib.closing(connect(path)) as db:
        db.execute("CREATE TABLE chunks (key BLOB)")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"TABLE chunks (key", b"TABLE chunks \xd9\xff(k"))
    with pytest.raises(sqlite3.DatabaseError, match="no text"):
        connect(path)


def test_no_interrupted_erasure_leaves_a_transaction_open(tmp_path):
    path = tmp_path / "index.sqlite"
    db = connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE one (text)")
    eraser = Eraser(db, path)
    for interruption in interruptions(sqlite_erasing):
        db.execute("INSERT INTO one VALUES ('a')")
        db.execute("DELETE FROM one")
        with interruption:
            eraser.erase()
        assert not db.in_transaction, interruption.where
    db.close()
    eraser.close()
