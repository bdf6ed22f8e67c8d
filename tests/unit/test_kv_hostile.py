"""Damaged, foreign, locked and forbidden store directories: a clear miss or a clear error."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stored_chunks import encoder, payload

from llmaas_hooks import StoreError
from llmaas_plugins._native import (
    Budget,
    Codec,
    KVGeometry,
    chunk_bound,
)
from llmaas_plugins.kv_chunks.disk import DiskStore
from llmaas_plugins.kv_chunks.extents import PAGE
from llmaas_plugins.kv_chunks.keys import chain
from llmaas_plugins.kv_chunks.store import ChunkStore

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))
BOUND = chunk_bound(GEOM, Codec.RAW, 16)
BUDGET = 1 << 20
A = np.arange(16 * 6 + 5, dtype=np.int32)
B = np.concatenate([A[:32], np.arange(500, 548, dtype=np.int32)])


def open_store(directory):
    return ChunkStore(Budget(BUDGET), DiskStore(directory, BUDGET))


def save(store, tokens, name=None):
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        assert store.put(ids[i], BOUND, encoder(GEOM, ids[i]), is_first=i == 0)
    store.touch(ids)
    if name is not None:
        store.set_head(name, ids)


def load(store, tokens):
    """Tokens of the chunks that came back, which are the right ones in any case."""
    path, n_tokens = store.match(ROOT, tokens)
    assert path == [] or path[-1].id in chain(ROOT, tokens[: sum(c.n_tokens for c in path)])
    addresses = store.fetch(path)
    ready = path[: len(addresses)]
    for chunk, address in zip(ready, addresses, strict=True):
        assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)
    store.release(ready)
    return min(n_tokens, sum(chunk.n_tokens for chunk in ready))


def works(directory):
    """Whatever happened to it, the store takes new contexts and keeps them."""
    store = open_store(directory)
    for _ in range(4):  # damage behind damage is met only when what is before it is sound again
        load(store, A)
        load(store, B)
        save(store, A, "a")
        save(store, B, "b")
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    store.close()
    store = open_store(directory)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    assert set(store.tree.contexts()) >= {"a", "b"}
    assert store.stats()["faults"] == 0
    store.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Files of a store that holds two contexts."""
    directory = tmp_path_factory.mktemp("original") / "kv"
    store = open_store(directory)
    store.set_layout(ROOT, '{"n_layer": 1}')
    save(store, A, "a")
    save(store, B, "b")
    store.close()
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def kv(original, tmp_path):
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700)
    for name, content in original.items():
        (directory / name).write_bytes(content)
    return directory


def edit(kv, *statements):
    db = sqlite3.connect(kv / "index.sqlite")
    for statement in statements:
        db.execute(*statement) if isinstance(statement, tuple) else db.execute(statement)
    db.commit()
    db.close()


def test_untouched_copy_is_whole(kv):
    store = open_store(kv)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    assert store.stats()["faults"] == 0
    store.close()


# -- the slab -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 2000, 8 * PAGE + 700])
def test_truncated_slab_keeps_what_is_left(kv, n_bytes):
    os.truncate(kv / "chunks.slab", n_bytes)
    store = open_store(kv)
    n_whole = max(0, n_bytes // PAGE - 1)
    assert load(store, A) in {16 * n_whole, len(A)}
    assert store.stats()["faults"] > 0
    store.close()
    works(kv)


def test_slab_that_ends_with_its_last_payload_is_whole(kv):
    store = open_store(kv)
    last = max(store.tree, key=lambda chunk: chunk.disk)
    end = store._shelf.disk.file_offset(last.disk) + last.size
    store.close()
    os.truncate(kv / "chunks.slab", end)
    store = open_store(kv)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    store.close()


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 9 * PAGE, b"LLMAASKV" * PAGE])
def test_slab_of_another_kind_is_a_miss(kv, content, caplog):
    (kv / "chunks.slab").write_bytes(content)
    store = open_store(kv)
    assert (load(store, A), load(store, B), len(store.tree)) == (0, 0, 0)
    assert store.stats()["contexts"] == 0
    store.close()
    assert "starting an empty one. Contexts are recomputed" in caplog.text
    works(kv)


def test_missing_slab_is_a_miss(kv):
    (kv / "chunks.slab").unlink()
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    works(kv)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"LLMBBSKV"), (8, b"\xff" * 4), (12, b"z" * 16)],
    ids=["magic", "impossible format", "another store"],
)
def test_other_header_is_a_miss(kv, at, value, caplog):
    with (kv / "chunks.slab").open("r+b") as file:
        file.seek(at)
        file.write(value)
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    assert "the slab's header does not belong to the index" in caplog.text
    assert (kv / "index.sqlite.unusable").exists()
    works(kv)


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_in_the_slab_cost_only_their_chunks(kv, seed):
    rng = np.random.default_rng(seed)
    content = bytearray((kv / "chunks.slab").read_bytes())
    for at in rng.integers(PAGE, len(content), 4):
        content[at] ^= 1 << rng.integers(8)
    (kv / "chunks.slab").write_bytes(content)
    store = open_store(kv)
    load(store, A)
    load(store, B)
    assert 0 <= store.stats()["faults"] <= 4
    store.close()
    works(kv)


def test_swapped_extents_are_told_by_their_keys(kv):
    content = (kv / "chunks.slab").read_bytes()
    first, second = content[PAGE : 2 * PAGE], content[2 * PAGE : 3 * PAGE]
    (kv / "chunks.slab").write_bytes(content[:PAGE] + second + first + content[3 * PAGE :])
    store = open_store(kv)
    assert load(store, A) == 0
    assert store.stats()["faults"] == 2
    store.close()
    works(kv)


# -- the index ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2**31 - 1, -(2**31)])
def test_index_of_an_impossible_format_is_a_miss(kv, version, caplog):
    edit(kv, f"PRAGMA user_version={version}")
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    assert f"index format {version}, expected 1" in caplog.text
    works(kv)


@pytest.mark.parametrize("content", [b"garbage" * 999, b"SQLite format 3\0" + b"\xff" * 9000])
def test_index_of_garbage_is_a_miss(kv, content):
    (kv / "index.sqlite").write_bytes(content)
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    assert (kv / "index.sqlite.unusable").read_bytes() == content
    works(kv)


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
def test_garbage_beside_the_index_does_no_harm(kv, name):
    (kv / name).write_bytes(b"\xa5" * 50_000)
    store = open_store(kv)
    assert load(store, A) == len(A)
    store.close()
    works(kv)


@pytest.mark.parametrize("size", [0, 100, 4096, 5000, 8192])
def test_truncated_index_is_a_miss(kv, size):
    os.truncate(kv / "index.sqlite", size)
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    works(kv)


@pytest.mark.parametrize("seed", range(16))
def test_flipped_bits_in_the_index_give_no_wrong_cells(kv, seed):
    rng = np.random.default_rng(seed)
    content = bytearray((kv / "index.sqlite").read_bytes())
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    for at in rng.choice(used, 3):
        content[at] ^= 1 << rng.integers(8)
    (kv / "index.sqlite").write_bytes(content)
    store = open_store(kv)
    load(store, A)
    load(store, B)
    store.close()
    works(kv)


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
    store = open_store(kv)
    assert (load(store, A), len(store.tree)) == (0, 0)
    store.close()
    works(kv)


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
    works(kv)


def test_overlapping_rows_are_not_both_believed(kv):
    first, second = chain(ROOT, A)[3], chain(ROOT, B)[3]
    place = "(SELECT offset FROM chunks WHERE key = ?)"
    edit(kv, (f"UPDATE chunks SET offset = {place} WHERE key = ?", (first.key, second.key)))
    store = open_store(kv)
    assert store.stats()["faults"] == 1
    assert load(store, B) == 48
    assert load(store, A) in {48, len(A)}
    store.close()
    works(kv)


@pytest.mark.parametrize("size", ["size - 1", "size - 30", "1", "size + 1"])
def test_wrong_size_is_found_when_the_chunk_is_read(kv, size):
    edit(kv, (f"UPDATE chunks SET size = {size} WHERE key = ?", (chain(ROOT, A)[3].key,)))
    store = open_store(kv)
    assert load(store, A) == 48
    assert store.stats()["faults"] == 1
    store.close()
    works(kv)


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
    works(kv)


def test_index_of_other_contexts_finds_nothing(kv):
    store = open_store(kv)
    assert store.match(b"q" * 32, A) == ([], 0)
    store.close()


def test_slab_and_index_of_two_stores_do_not_mix(kv, tmp_path):
    other = tmp_path / "other"
    store = open_store(other)
    save(store, B, "b")
    store.close()
    (kv / "chunks.slab").write_bytes((other / "chunks.slab").read_bytes())
    store = open_store(kv)
    assert (load(store, A), load(store, B), len(store.tree)) == (0, 0, 0)
    store.close()
    works(kv)


# -- other formats ------------------------------------------------------------------------------


def files(directory):
    """Everything in a store but the lock, byte for byte."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name not in {"lock", "index.sqlite-shm"}
    }


def header_of(version):
    def change(kv):
        with (kv / "chunks.slab").open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", version))

    return change


def index_of(version):
    return lambda kv: edit(kv, f"PRAGMA user_version={version}")


def log_of_newer_index(kv):
    """The process that wrote it was killed: the version is in the log only."""
    db = sqlite3.connect(kv / "index.sqlite")
    db.execute("CREATE TABLE more (id BLOB)")
    db.execute("PRAGMA user_version=2")
    db.commit()
    kept = {path: path.read_bytes() for path in kv.glob("index.sqlite*")}
    db.close()
    for path, content in kept.items():
        path.write_bytes(content)
    (kv / "index.sqlite-shm").unlink()


OTHER_FORMATS = {
    "newer slab": (2, header_of(2)),
    "much newer slab": (77, header_of(77)),
    "older slab": (0, header_of(0)),
    "newer index": (2, index_of(2)),
    "older index": (0, index_of(0)),
    "newer index in the log": (2, log_of_newer_index),
    "foreign index": (0, lambda kv: edit(kv, "PRAGMA user_version=0", "CREATE TABLE x (y)")),
}


@pytest.mark.parametrize(("found", "change"), OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_store_of_another_format_is_refused_and_left_as_it_is(kv, found, change):
    change(kv)
    before = files(kv)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"nothing was changed\. Use the vers") as caught:
            open_store(kv)
        assert f"has format {found}, this version of llmaas_plugins reads format 1" in str(
            caught.value
        )
    assert files(kv) == before


# -- lock and permissions -----------------------------------------------------------------------


IN_USE = (
    r"KV store .*kv is in use by this process already\. Stop it, or set plugins\.kv_chunks\.store"
)


def test_second_open_is_refused_and_changes_nothing(kv):
    store = open_store(kv)
    before = {path.name: path.read_bytes() for path in kv.iterdir()}
    with pytest.raises(StoreError, match=IN_USE):
        DiskStore(kv, BUDGET)
    assert {path.name: path.read_bytes() for path in kv.iterdir()} == before
    assert load(store, A) == len(A)
    store.close()
    open_store(kv).close()


def run(script, *args, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


OPEN = """
import os, sys
from pathlib import Path
from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.disk import DiskStore
if os.geteuid() == 0 and "drop" in sys.argv:
    os.setgroups([])
    os.setuid(65534)
try:
    DiskStore(Path(sys.argv[1]), 1 << 20)
except StoreError as error:
    print(error)
    sys.exit(3)
print("opened")
"""


def test_second_process_is_refused(kv):
    store = open_store(kv)
    found = run(OPEN, kv)
    store.close()
    assert found.returncode == 3, found.stderr
    assert f"is in use by process {os.getpid()} (" in found.stdout
    assert "Stop it, or set plugins.kv_chunks.store to another directory" in found.stdout
    assert run(OPEN, kv).stdout == "opened\n"


def test_killed_process_leaves_no_lock_and_nothing_half_done(tmp_path):
    script = OPEN + "os.kill(os.getpid(), 9)\n"
    assert run(script, tmp_path / "kv").returncode == -9
    works(tmp_path / "kv")


@pytest.mark.parametrize(("mode", "name"), [(0o555, "kv/new"), (0o500, "kv"), (0o555, "kv")])
def test_directory_that_may_not_be_written_is_named(kv, mode, name):
    before = {path.name: path.read_bytes() for path in kv.iterdir()}
    kv.chmod(mode)
    found = run(OPEN, name, "drop", cwd=kv.parent)
    kv.chmod(0o700)
    assert found.returncode == 3, found.stderr
    assert f"cannot use KV store {name}: Permission denied. Set plugins.kv_chunks.store to a" in (
        found.stdout
    )
    assert {path.name: path.read_bytes() for path in kv.iterdir()} == before


def test_file_in_the_way_is_named(tmp_path):
    (tmp_path / "kv").write_text("not a directory")
    with pytest.raises(StoreError, match=r"kv: File exists\. Set plugins\.kv_chunks\.store to"):
        DiskStore(tmp_path / "kv", BUDGET)
    with pytest.raises(StoreError, match="Not a directory"):
        DiskStore(tmp_path / "kv/below", BUDGET)


@pytest.mark.parametrize("name", ["chunks.slab", "index.sqlite"])
def test_store_that_cannot_be_opened_is_not_left_locked(kv, name):
    content = (kv / name).read_bytes()
    (kv / name).unlink()
    (kv / name).mkdir()
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    with pytest.raises(StoreError, match=r"cannot use KV store .*kv: "):
        DiskStore(kv, BUDGET)
    assert len(list(open_files.iterdir())) == before
    (kv / name).rmdir()
    (kv / name).write_bytes(content)
    store = open_store(kv)
    assert load(store, A) == len(A)
    store.close()


def test_only_the_owner_can_read_the_store(tmp_path):
    old_umask = os.umask(0)
    try:
        store = open_store(tmp_path / "deep/kv")
        save(store, A, "a")
        store.flush()
        assert os.umask(0) == 0  # the process's own is back
    finally:
        os.umask(old_umask)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in store._swap.directory.iterdir()
    }
    assert stat.S_IMODE(store._swap.directory.stat().st_mode) == 0o700
    store.close()
    assert set(modes) >= {"lock", "chunks.slab", "index.sqlite", "index.sqlite-wal"}
    assert set(modes.values()) == {0o600}


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore(Path("~/kv"), BUDGET)
    assert store.directory == tmp_path / "kv"
    store.close()
