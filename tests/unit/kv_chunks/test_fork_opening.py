"""Forks of the process while another thread opens the chunk store."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from forking import in_child

from llmaas_hooks import forks
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.kv_chunks.plugin import KVChunks
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on
STEPS = {
    "the directory is locked": (DiskStore, "_open_index"),
    "the index is read": (DiskStore, "load"),
    "the rest is ready": (ChunkStore, "__init__"),
}


class Releaser(forks.Forked):
    """Object that learns of a fork first, and then lets the opening thread continue."""

    runs_work = True

    def __init__(self, may_end):
        self.may_end = may_end
        forks.watch(self)

    def before_fork(self):
        self.may_end.set()


def held_at(monkeypatch, owner, name):
    """Hold the opening thread after a step; return two events: it is held, and it may go on."""
    is_there, may_end = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def held(*args, **kwargs):
        result = original(*args, **kwargs)
        is_there.set()
        may_end.wait(20)
        return result

    monkeypatch.setattr(owner, name, held)
    return is_there, may_end


def _descriptor(path):
    """Return this process's descriptor of an open file."""
    for opened in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if opened.samefile(path):
                return int(opened.name)
    raise AssertionError(f"{path} is not open")


@pytest.mark.parametrize("step", STEPS)
def test_a_child_forked_while_the_store_opens_leaves_the_files_to_its_parent(
    tmp_path, monkeypatch, step
):
    """The fork waits for the opening; the child continues with RAM alone."""
    plugin = KVChunks(KVChunksConfig(store=tmp_path / "kv", ram_budget="1 MiB"))
    is_there, may_end = held_at(monkeypatch, *STEPS[step])
    releaser = Releaser(may_end)
    opening = threading.Thread(target=plugin._open)
    opening.start()
    is_there.wait(20)

    lock = _descriptor(tmp_path / "kv" / "lock")

    def child():
        assert plugin._open().stats()["store"] is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lock)

    code = in_child(child)
    opening.join()
    del releaser
    with contextlib.closing(plugin._open()) as store:
        assert code == 0
        assert store.stats()["store"] is not None
