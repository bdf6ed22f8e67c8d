"""A deleted context leaves no byte in the service's folders, however its deletion ended."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest
from reading import reader_of

from llmaas_hooks import LimitError, StoreError
from llmaas_plugins import activate
from llmaas_plugins.files import sqlite_erasing
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.service import LLMService, ServiceConfig
from llmaas_plugins.service.call_queue import CallQueue
from llmaas_plugins.service.context_log import ContextLog

SECRET = "The zebra's passphrase is quartz-7741."
KEPT = "You answer letters, and you never say more than you were asked about the weather. " * 2
SAMPLING = {"temperature": 0.0, "max_tokens": 4}


@pytest.fixture
def opened(make):
    """Return a function that starts a suite and a service in a folder, replacing earlier ones."""
    closing = []

    def close():
        while closing:
            closing.pop()()

    def start(folder, **limits):
        close()
        kv = {"codec": "lossless", "store": str(folder / "kv")}
        suite = activate({"on_error": "raise", "plugins": {"kv_chunks": kv}})
        closing.append(suite.deactivate)
        llama = make(n_ctx=512, flash_attn=True)
        closing.append(llama.close)
        service = LLMService(llama, ServiceConfig(state_dir=folder / "state", **limits))
        closing.append(service.close)
        return suite, service

    start.close = close
    yield start
    close()


@pytest.fixture
def chats(opened, tmp_path):
    """Return two contexts with a common beginning, and the first one's private text and tokens."""
    folder = tmp_path / "now"
    suite, service = opened(folder)
    app = service.bind("mail")
    secret, kept = (app.new_context(KEPT) for _ in range(2))
    secret.call(f"{SECRET} Repeat it.", **SAMPLING)
    tokens = service._queue._engine()._input_ids.copy()
    kept.call("How is the weather?", **SAMPLING)
    other = service._queue._engine()._input_ids.copy()
    suite.settle()
    suite.plugin("kv_chunks")._store.flush()
    n_common = int(np.argmin(tokens[: len(other)] == other[: len(tokens)])) // 16 * 16
    assert n_common >= 16
    traces = [
        tokens[i : i + 16].astype("<i4").tobytes() for i in range(n_common, len(tokens) - 16, 16)
    ]
    return folder, secret, kept, [SECRET.encode(), *traces]


def left_in(folder, traces):
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert KEPT.strip().encode() in data
    return [trace for trace in traces if trace in data]


def test_text_and_tokens_are_gone_when_the_call_returns(chats, opened):
    folder, secret, kept, traces = chats
    assert left_in(folder, traces) == traces
    assert secret.delete() > 0
    assert left_in(folder, traces) == []
    with pytest.raises(LookupError, match=secret.id):
        secret.delete()
    _, service = opened(folder)
    (again,) = service.bind("mail").contexts()
    assert again.id == kept.id
    assert again.call("And tomorrow?", **SAMPLING).text


def test_killed_while_a_turn_is_being_saved(chats, opened, tmp_path, monkeypatch):
    """Chunks that the disk got before the turn's last chunk was saved belong to the context."""
    folder, secret, _, _ = chats
    stored = []
    put = ChunkStore.put

    def put_and_copy(self, wanted, *args, **kwargs):
        is_put = put(self, wanted, *args, **kwargs)
        stored.append(wanted.tokens)
        if len(stored) == 3:
            self.flush()
            shutil.copytree(folder / "kv", tmp_path / "killed/kv")
        return is_put

    shutil.copytree(folder / "state", tmp_path / "killed/state")  # while nobody writes it
    monkeypatch.setattr(ChunkStore, "put", put_and_copy)
    secret.call(f"{SECRET} Repeat it three times, and say what it may open. " * 2, **SAMPLING)
    opened.close()  # when the turn is saved
    monkeypatch.setattr(ChunkStore, "put", put)
    assert len(stored) >= 3
    assert left_in(tmp_path / "killed", stored[:3]) == stored[:3]
    _, service = opened(tmp_path / "killed")
    service.bind("mail").context(secret.id).delete()
    assert left_in(tmp_path / "killed", stored[:3]) == []


STEPS = {
    "before the commit": (ContextLog, "delete", "before"),
    "after the commit": (ContextLog, "delete", "after"),
    "before the KV": (CallQueue, "forget", "before"),
    "after the index": (DiskStore, "end_erasing", "before"),
    "after the KV": (ContextLog, "erase", "before"),
    "after the text": (ContextLog, "erase", "after"),
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_in_the_middle(chats, opened, tmp_path, monkeypatch, step):
    """Copy the folders at that moment, as a kill would leave them, and open the copy later."""
    folder, secret, _, traces = chats
    kind, name, when = STEPS[step]
    done = getattr(kind, name)

    def copy_here(*args):
        if when == "before":
            shutil.copytree(folder, tmp_path / "killed")
        found = done(*args)
        if when == "after":
            shutil.copytree(folder, tmp_path / "killed")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, copy_here)
        secret.delete()
    suite, service = opened(tmp_path / "killed")
    names = [context.id for context in service.bind("mail").contexts()]
    if step == "before the commit":
        assert secret.id in names
        assert left_in(tmp_path / "killed", traces) == traces
        assert service.bind("mail").context(secret.id).delete() > 0
    assert left_in(tmp_path / "killed", traces) == []
    assert secret.id not in suite.plugin("kv_chunks")._store.tree.contexts()
    assert service._log.deletions() == []


def test_a_context_that_is_read_meanwhile(chats, monkeypatch):
    folder, secret, _, traces = chats
    log = secret.app._log
    log._db.execute("PRAGMA busy_timeout=100")
    with reader_of(folder / "state" / "contexts.sqlite") as pid:
        with pytest.raises(StoreError, match=rf"process {pid} \(.*contexts\.sqlite"):
            secret.delete()
        assert left_in(folder, traces) == [traces[0]]  # the text stays for the reader
        with pytest.raises(LookupError):
            secret.record()
    assert secret.delete() == 0
    assert left_in(folder, traces) == []


def test_deleted_while_its_call_runs(chats):
    folder, secret, _, traces = chats
    stream = secret.stream("Go on.", temperature=0.0, max_tokens=40)
    next(stream)
    secret.delete()
    # from here on, a kill does not lose the deletion
    assert secret.app._log.deletions() == [secret.id]
    with pytest.raises(LookupError, match="deleted during the call"):
        list(stream)
    assert secret.app._log.deletions() == []
    assert left_in(folder, traces) == []


@pytest.mark.parametrize("plugins", [None, {"elastic": {}}], ids=["no suite", "another plugin"])
def test_deleted_while_its_store_is_not_open(chats, opened, plugins):
    """The KV is deleted when a service finds it again."""
    folder, secret, _, traces = chats
    opened.close()
    with contextlib.ExitStack() as stack:
        if plugins is not None:
            stack.enter_context(activate({"plugins": plugins}))
        config = ServiceConfig(state_dir=folder / "state")
        service = stack.enter_context(LLMService(lambda: None, config))
        service.bind("mail").context(secret.id).delete()
        with pytest.raises(LookupError):
            service.bind("mail").context(secret.id)
        assert left_in(folder, traces) != []
    _, service = opened(folder)
    assert left_in(folder, traces) == []
    assert service._log.deletions() == []


def test_a_call_that_fails_early_is_not_taken_for_running(chats, opened):
    folder, _, kept, _ = chats
    _, service = opened(folder, max_context_tokens=16)
    context = service.bind("mail").context(kept.id)
    with pytest.raises(LimitError):
        context.call("Hello", **SAMPLING)
    context.delete()
    assert service._log.deletions() == []


def test_a_file_of_before_is_cleaned_once(chats, opened):
    """Earlier versions left deleted texts in free pages."""
    folder, secret, kept, traces = chats
    secret.delete()
    opened(folder.parent / "other")
    with sqlite_erasing.connect(folder / "state" / "contexts.sqlite") as db:
        db.execute("PRAGMA secure_delete=OFF")
        db.execute("DROP TABLE deletions")
        db.execute("ALTER TABLE contexts DROP COLUMN has_kv")
        db.execute("PRAGMA user_version=2")
        db.execute("CREATE TABLE old (text)")
        db.execute("INSERT INTO old VALUES (?)", (SECRET * 500,))
        db.execute("DROP TABLE old")
    db.close()
    assert SECRET.encode() in (folder / "state" / "contexts.sqlite").read_bytes()
    _, service = opened(folder)
    assert left_in(folder, traces) == []
    assert service.bind("mail").context(kept.id).record().n_calls == 1
