"""Damaged, foreign, locked and forbidden store directories: a clear miss or a clear error."""

from __future__ import annotations

import ctypes
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from forking import in_child
from stored_chunks import payload, put

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import (
    Budget,
    KVGeometry,
)
from llmaas_plugins.kv_chunks.maintenance.snapshot import read_snapshot
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))
BUDGET = 1 << 20
A = np.arange(16 * 6 + 5, dtype=np.int32)
B = np.concatenate([A[:32], np.arange(500, 548, dtype=np.int32)])
C = np.arange(3000, 3070, dtype=np.int32)


def open_store(directory):
    return ChunkStore(Budget(BUDGET), DiskStore(directory, BUDGET))


def save(store, tokens, name=None):
    put(store, GEOM, chain(ROOT, tokens), name)


def load(store, tokens):
    """Return the number of tokens in loaded chunks; assert that these are correct."""
    path, n_tokens = store.match(ROOT, tokens)
    assert path == [] or path[-1].id in chain(ROOT, tokens[: sum(c.n_tokens for c in path)])
    addresses = store.reader.fetch(path)
    ready = path[: len(addresses)]
    for chunk, address in zip(ready, addresses, strict=True):
        assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)
    store.reader.unpin(ready)
    return min(n_tokens, sum(chunk.n_tokens for chunk in ready))


def works(directory):
    """Assert that the store still takes and keeps new contexts."""
    store = open_store(directory)
    for _ in range(4):  # later damage shows only once the damage before it is repaired
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
    """Return the files of a store that holds two contexts."""
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
    end = store._residency.disk.file_offset(last.disk) + last.size
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
    assert "starting an empty one. Contexts will be recomputed" in caplog.text
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
    assert f"index format {version}, expected {FORMAT}" in caplog.text
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
    """Return all of a store's files but the lock, byte for byte."""
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
    """The writing process was killed, so the version is in the log only."""
    db = sqlite3.connect(kv / "index.sqlite")
    db.execute("CREATE TABLE more (id BLOB)")
    db.execute(f"PRAGMA user_version={FORMAT + 1}")
    db.commit()
    kept = {path: path.read_bytes() for path in kv.glob("index.sqlite*")}
    db.close()
    for path, content in kept.items():
        path.write_bytes(content)
    (kv / "index.sqlite-shm").unlink()


OTHER_FORMATS = {
    "newer slab": (FORMAT + 1, header_of(FORMAT + 1)),
    "much newer slab": (77, header_of(77)),
    "older slab": (FORMAT - 1, header_of(FORMAT - 1)),
    "newer index": (FORMAT + 1, index_of(FORMAT + 1)),
    "older index": (FORMAT - 1, index_of(FORMAT - 1)),
    "newer index in the log": (FORMAT + 1, log_of_newer_index),
    "foreign index": (0, lambda kv: edit(kv, "PRAGMA user_version=0", "CREATE TABLE x (y)")),
}


@pytest.mark.parametrize(("found", "change"), OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_store_of_another_format_is_refused_and_left_as_it_is(kv, found, change):
    change(kv)
    before = files(kv)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"nothing was changed\. Use the vers") as caught:
            open_store(kv)
        assert (
            f"has format {found}, but this version of llmaas_plugins reads format {FORMAT}"
            in str(caught.value)
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
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
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
        assert os.umask(0) == 0  # the process's own umask is back
    finally:
        os.umask(old_umask)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in store._writer.directory.iterdir()
    }
    assert stat.S_IMODE(store._writer.directory.stat().st_mode) == 0o700
    store.close()
    assert set(modes) >= {"lock", "chunks.slab", "index.sqlite", "index.sqlite-wal"}
    assert set(modes.values()) == {0o600}


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore(Path("~/kv"), BUDGET)
    assert store.directory == tmp_path / "kv"
    store.close()


# -- odd files, wide modes, other owners ---------------------------------------------------------

NAMES = ["lock", "chunks.slab", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"]


@pytest.mark.parametrize("name", NAMES)
def test_link_in_place_of_a_file_is_refused_and_not_followed(kv, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (kv / name).unlink(missing_ok=True)
    (kv / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match=rf"cannot use .*: {name} is a symbolic link\. Remove it"):
        open_store(kv)
    assert elsewhere.read_bytes() == b"precious"
    (kv / name).unlink()
    works(kv)


@pytest.mark.parametrize("name", NAMES)
def test_dangling_link_makes_no_file(kv, tmp_path, name):
    (kv / name).unlink(missing_ok=True)
    (kv / name).symlink_to(tmp_path / "made")
    with pytest.raises(StoreError, match="is a symbolic link"):
        open_store(kv)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.parametrize("name", NAMES)
def test_other_things_in_place_of_a_file_are_refused_at_once(kv, name, make):
    (kv / name).unlink(missing_ok=True)
    make(kv / name)
    with pytest.raises(StoreError, match=rf"cannot use .*: {name} is not a regular file\. Remove"):
        open_store(kv)


def test_link_to_the_directory_is_followed(kv, tmp_path):
    """A link is the user's own choice of another disk."""
    (tmp_path / "link").symlink_to(kv)
    store = open_store(tmp_path / "link")
    assert load(store, A) == len(A)
    with pytest.raises(StoreError, match="is in use by this process already"):
        open_store(kv)
    store.close()


def test_wide_modes_are_tightened(kv):
    (kv / "index.sqlite-wal").touch()
    for path in [kv, *kv.iterdir()]:
        path.chmod(0o777)
    store = open_store(kv)
    save(store, A, "a")
    store.flush()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in kv.iterdir()}
    assert (stat.S_IMODE(kv.stat().st_mode), modes) == (0o700, {0o600})
    store.close()


@pytest.mark.parametrize(("mode", "is_refused"), [(0o755, False), (0o777, True), (0o770, True)])
def test_directory_with_other_files_keeps_its_mode(tmp_path, mode, is_refused):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "somebody's").touch()
    shared.chmod(mode)
    if is_refused:
        with pytest.raises(
            StoreError, match=rf"may write to it \(mode {mode:04o}\), and it also holds"
        ):
            open_store(shared)
        assert [path.name for path in shared.iterdir()] == ["somebody's"]
    else:
        open_store(shared).close()
        assert stat.S_IMODE((shared / "index.sqlite").stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.stat().st_mode) == mode


def test_store_of_another_user_is_refused(kv):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for path in (kv.parent, kv, *kv.iterdir()):
        path.chmod(0o777)
    before = {path.name: path.read_bytes() for path in kv.iterdir()}
    found = run(OPEN, "kv", "drop", cwd=kv.parent)
    assert found.returncode == 3, found.stderr
    assert (
        "kv is open to other users and cannot be made private: Operation not perm" in found.stdout
    )
    assert {path.name: path.read_bytes() for path in kv.iterdir()} == before


READ_ONLY = 'mount --bind {0} {0} && mount -o remount,bind,ro {0} && shift && exec "$@"'


@pytest.mark.slow
def test_read_only_file_system_is_named(kv):
    """Even root cannot write there."""
    script = READ_ONLY.format(kv)
    mounts = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", "-"]
    try:
        can = subprocess.run([*mounts, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can = False
    if not can:
        pytest.skip("needs unshare(1) and the right to mount")
    found = subprocess.run(
        [*mounts, sys.executable, "-c", OPEN, str(kv)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 3, found.stderr
    assert "kv: Read-only file system. Set plugins.kv_chunks.store to a directory" in found.stdout
    look = "import sys; from llmaas_plugins.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for action in ("stats", "check"):
        command = [*mounts, sys.executable, "-c", look, "store", action, "--store", str(kv)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


def test_missing_parents_are_made(tmp_path):
    works(tmp_path / "not/yet/there")


@pytest.mark.parametrize("name", ["/proc/kv", "/dev/null/kv", "/sys/kv"])
def test_place_that_holds_no_files_is_named(name):
    with pytest.raises(StoreError, match=f"cannot use KV store {name}: .*Set plugins.kv_chunks"):
        DiskStore(Path(name), BUDGET)


# -- who holds the lock --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "another process"),
        (b"4242\npython app.py\n", "process 4242 (python app.py)"),
        (b"4242", "process 4242"),
        (b"-5\nx", "another process"),
        ("٤٢\nx".encode(), "another process"),
        (b"9" * 5000, f"process {'9' * 400}"),
        (b"77\n\x1b[31mred\n\x00\xff" + b"x" * 9000, None),
    ],
)
def test_holders_name_is_shown_and_never_believed(kv, content, shown):
    store = open_store(kv)
    (kv / "lock").write_bytes(content)
    with pytest.raises(StoreError, match="is in use by") as caught:
        open_store(kv)
    message = str(caught.value)
    assert message.replace("�", "").isprintable()
    assert len(message) < 1000
    assert shown is None or f"is in use by {shown}. Stop it" in message
    store.close()


def test_lock_of_a_dead_process_is_no_obstacle(kv):
    (kv / "lock").write_text("1\ninit\n")
    works(kv)
    assert (kv / "lock").read_bytes() == b""


# -- fork ----------------------------------------------------------------------------------------


# Python 3.12 warns about threads
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@FORKS
def test_forked_child_changes_nothing_on_disk(kv):
    store = open_store(kv)
    save(store, np.arange(2000, 2050, dtype=np.int32), "new")  # not written yet
    before = files(kv)

    def work():
        assert load(store, A) == 0  # on disk, which belongs to the parent
        assert load(store, np.arange(2000, 2050, dtype=np.int32)) == 50  # in RAM
        save(store, A, "a")
        assert load(store, A) == len(A)
        store.flush()
        store.evict_context("a")
        assert store.stats()["store"] is None
        store.close()

    assert in_child(work) == 0
    assert files(kv) == before
    assert load(store, A) == len(A)
    store.close()
    store = open_store(kv)
    assert set(store.tree.contexts()) == {"a", "b", "new"}
    assert (load(store, A), load(store, B), store.stats()["faults"]) == (len(A), len(B), 0)
    store.close()


@FORKS
def test_forked_child_does_not_keep_the_lock(kv):
    store = open_store(kv)
    reading, writing = os.pipe()

    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # stays alive until the parent is done
        os._exit(0)
    store.close()
    works(kv)
    os.close(writing)
    os.close(reading)
    assert os.waitpid(pid, 0)[1] == 0


@FORKS
def test_child_of_a_busy_parent_is_not_stuck(kv):
    """Other threads hold the locks all the time; the child, without these threads, continues."""
    store = open_store(kv)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            load(store, A)
            store.touch(chain(ROOT, B))
            store.flush()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    codes = [in_child(lambda: (load(store, A), save(store, B, "b"))) for _ in range(5)]
    stop.set()
    for thread in threads:
        thread.join()
    assert codes == [0] * 5
    assert load(store, A) == len(A)
    store.close()
    works(kv)


@FORKS
@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 20_000])
@pytest.mark.parametrize("is_looked_at", [False, True])
def test_shared_memory_that_is_too_short_is_built_again(kv, tmp_path, n_bytes, is_looked_at):
    """SQLite maps this file, and the first process to open a database builds it again."""
    store = open_store(kv)
    save(store, C, "c")
    store.flush()  # into the log
    killed = shutil.copytree(kv, tmp_path / "killed")
    store.close()
    assert (killed / "index.sqlite-shm").stat().st_size > n_bytes
    os.truncate(killed / "index.sqlite-shm", n_bytes)

    def work():
        if is_looked_at:
            assert set(read_snapshot(killed).contexts) == {"a", "b", "c"}
            return
        store = open_store(killed)
        assert load(store, C) == len(C)

    assert in_child(work) == 0


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
    works(kv)


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


@pytest.mark.parametrize("column", ["offset", "size"])
def test_chunks_in_a_slab_of_a_thousand_gigabytes_cost_no_memory(kv, column):
    os.truncate(kv / "chunks.slab", 1 << 40)  # a hole
    edit(kv, f"UPDATE chunks SET {column} = 1 << 39 WHERE offset = 0")
    store = open_store(kv)
    assert (kv / "chunks.slab").stat().st_size <= BUDGET
    assert load(store, A) == 0
    store.close()
    works(kv)


# -- what is deleted -----------------------------------------------------------------------------


def on_disk(kv):
    return b"".join(path.read_bytes() for path in kv.iterdir())


def test_deleted_context_is_gone_from_the_disk(kv):
    """Cells, tokens and name are gone, also from the index's log and free pages."""
    only_a, only_b = chain(ROOT, A)[2:], chain(ROOT, B)[2:]
    assert all(payload(GEOM, wanted) in on_disk(kv) for wanted in only_a)
    store = open_store(kv)
    store.evict_context("a")
    left = on_disk(kv)
    for wanted in only_a:
        assert payload(GEOM, wanted)[128:] not in left
        assert wanted.tokens not in left
        assert wanted.key not in left
    assert all(payload(GEOM, wanted) in left for wanted in only_b)
    assert load(store, B) == len(B)
    store.close()
    works(kv)


def test_what_left_the_disk_before_is_erased_too(kv):
    """This covers chunks replaced by a larger one, evicted for room, or left by a crash."""
    with (kv / "chunks.slab").open("r+b") as file:
        file.seek(60 * PAGE)
        file.write(b"left by a flush whose process was killed")
    store = open_store(kv)
    first = np.arange(7000, 7036, dtype=np.int32)
    save(store, first, "grows")
    store.flush()
    save(store, np.arange(7000, 7064, dtype=np.int32), "grows")
    store.flush()
    partial = chain(ROOT, first)[-1]
    store.evict_context("b")
    assert b"left by a flush" not in on_disk(kv)
    assert payload(GEOM, partial)[128:] not in on_disk(kv)
    store.close()


def test_context_deleted_while_it_is_written_is_gone_too(kv, monkeypatch):
    store = open_store(kv)
    tokens = np.arange(7000, 7064, dtype=np.int32)
    save(store, tokens, "late")
    write, deleted = _native.store_write, []

    def slow_write(*args):
        thread = threading.Thread(target=lambda: deleted.append(store.evict_context("late")))
        thread.start()
        while store.tree.contexts().get("late"):
            pass
        monkeypatch.undo()
        deleted.append(thread)
        return write(*args)

    monkeypatch.setattr(_native, "store_write", slow_write)
    store.flush()
    deleted[0].join()
    assert deleted[1] > 0
    assert all(payload(GEOM, wanted)[128:] not in on_disk(kv) for wanted in chain(ROOT, tokens))
    store.close()
    works(kv)


def test_erasing_that_fails_is_told_and_made_up_for(kv, monkeypatch):
    store = open_store(kv)

    def fail(*args):
        raise StoreError(5, "chunk store: erasing stopped")

    monkeypatch.setattr(_native, "store_erase", fail)
    with pytest.raises(StoreError, match="erasing stopped"):
        store.evict_context("a")
    assert payload(GEOM, chain(ROOT, A)[4]) in on_disk(kv)
    monkeypatch.undo()
    store.evict_context("b")
    assert payload(GEOM, chain(ROOT, A)[4])[128:] not in on_disk(kv)
    store.close()
