"""Folders and files of a store: private, owned, no links; what is in the way is named."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from damages import LINKS, ODD, each, files
from kv_stores import BUDGET, FILES, OPEN, A, assert_works, load, open_store, run, save

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.maintenance.snapshot import read_snapshot
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore


@pytest.mark.parametrize(("mode", "name"), [(0o555, "kv/new"), (0o500, "kv"), (0o555, "kv")])
def test_directory_that_may_not_be_written_is_named(kv, mode, name):
    before = files(kv)
    kv.chmod(mode)
    found = run(OPEN, name, "drop", cwd=kv.parent)
    kv.chmod(0o700)
    assert found.returncode == 3, found.stderr
    assert f"cannot use KV store {name}: Permission denied. Set plugins.kv_chunks.store to a" in (
        found.stdout
    )
    assert files(kv) == before


def test_file_in_the_way_is_named(tmp_path):
    (tmp_path / "kv").write_text("not a directory")
    with pytest.raises(StoreError, match=r"kv: File exists\. Set plugins\.kv_chunks\.store to"):
        DiskStore(tmp_path / "kv", BUDGET)
    with pytest.raises(StoreError, match="Not a directory"):
        DiskStore(tmp_path / "kv/below", BUDGET)


@pytest.mark.parametrize("name", [b"\xff", b"a?b#c%41 d", b"\xc3\xa9"])
def test_folders_may_have_any_name(tmp_path, name):
    """Names of files are bytes, which need be no Unicode, and mean something else in a URI."""
    kv = tmp_path / os.fsdecode(name)
    store = open_store(kv)
    save(store, A, "a")
    store.close()
    assert set(read_snapshot(kv).contexts) == {"a"}
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


def test_missing_parents_are_made(tmp_path):
    assert_works(tmp_path / "not/yet/there")


@pytest.mark.parametrize("name", ["/proc/kv", "/dev/null/kv", "/sys/kv"])
def test_place_that_holds_no_files_is_named(name):
    with pytest.raises(StoreError, match=f"cannot use KV store {name}: .*Set plugins.kv_chunks"):
        DiskStore(Path(name), BUDGET)


# -- odd files, wide modes, other owners ---------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@each(LINKS)
def test_link_in_place_of_a_file_is_refused_and_not_followed(kv, name, damage):
    damage(kv / name)
    before = files(kv, but=[name, "lock"])
    with pytest.raises(StoreError, match=rf"cannot use .*: {name} is a symbolic link\. Remove it"):
        open_store(kv)
    assert files(kv, but=[name, "lock"]) == before
    (kv / name).unlink()
    assert_works(kv)


@pytest.mark.parametrize("name", FILES)
@each(ODD)
def test_other_things_in_place_of_a_file_are_refused_at_once(kv, name, damage):
    damage(kv / name)
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
    before = files(kv)
    found = run(OPEN, "kv", "drop", cwd=kv.parent)
    assert found.returncode == 3, found.stderr
    assert (
        "kv is open to other users and cannot be made private: Operation not perm" in found.stdout
    )
    assert files(kv) == before


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
