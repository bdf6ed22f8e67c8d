"""Who holds a store: one process at a time, named in messages; forked children hold nothing."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from damages import files
from forking import in_child
from kv_stores import BUDGET, OPEN, ROOT, A, B, assert_works, load, open_store, run, save

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.maintenance.snapshot import read_snapshot
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore

C = np.arange(3000, 3070, dtype=np.int32)
IN_USE = (
    r"KV store .*kv is in use by this process already\. Stop it, or set plugins\.kv_chunks\.store"
)


def test_second_open_is_refused_and_changes_nothing(kv):
    store = open_store(kv)
    before = files(kv)
    with pytest.raises(StoreError, match=IN_USE):
        DiskStore(kv, BUDGET)
    assert files(kv) == before
    assert load(store, A) == len(A)
    store.close()
    open_store(kv).close()


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
    assert_works(tmp_path / "kv")


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
    assert_works(kv)
    assert (kv / "lock").read_bytes() == b""


# -- fork ----------------------------------------------------------------------------------------


# Python 3.12 warns about threads
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@FORKS
def test_forked_child_changes_nothing_on_disk(kv):
    store = open_store(kv)
    save(store, np.arange(2000, 2050, dtype=np.int32), "new")  # not written yet
    before = files(kv, but=["lock", "index.sqlite-shm"])

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
    assert files(kv, but=["lock", "index.sqlite-shm"]) == before
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
    assert_works(kv)
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
    assert_works(kv)


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


@pytest.mark.parametrize("option", ["--api_key ", "--client-secret=", "--password ", "--hf_token="])
def test_a_holders_secrets_are_neither_written_nor_shown(kv, monkeypatch, option):
    command = f"app.py {option}sesame --max_tokens 5"
    monkeypatch.setattr("sys.argv", command.split())
    store = open_store(kv)
    assert f" app.py {option}… --max_tokens 5" in (kv / "lock").read_text()
    (kv / "lock").write_text(f"1\n{command}\n")  # as an earlier version wrote it
    with pytest.raises(StoreError, match=rf"\(app\.py {option}… --max_tokens 5\)"):
        open_store(kv)
    store.close()
