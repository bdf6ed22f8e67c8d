"""A state folder belongs to one service at a time, that of a server or of an app."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import stat
import threading

import pytest
from forking import in_child

from llmaas_hooks import StoreError
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.service import LLMService
from llmaas_plugins.service.state_lock import StateLock


def service(folder):
    return LLMService(lambda: None, ServiceConfig(state_dir=folder))


def test_a_state_folder_is_for_one_service(tmp_path):
    folder, link = tmp_path / "state", tmp_path / "link"
    link.symlink_to(folder)
    with service(folder) as first:
        context = first.bind("mail").new_context("Anna is here.")
        for path in (folder, link):
            with pytest.raises(StoreError, match=r"another service uses .*state_dir"):
                service(path)
    with service(link) as again:
        assert again.bind("mail").contexts() == [type(context)(context.id, again.bind("mail"))]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_one_that_nobody_closed_is_free_when_it_is_collected(tmp_path):
    service(tmp_path)
    gc.collect()
    service(tmp_path).close()


def test_a_forked_child_does_not_keep_it(tmp_path):
    first = service(tmp_path)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        first.close()
        service(tmp_path).close()
    finally:
        os.write(writer, b"!")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_forked_child_leaves_it_to_its_parent(tmp_path):
    """Nothing hangs in the child, whatever the parent's threads are doing."""
    busy, ends = threading.Event(), threading.Event()

    def engine():
        busy.set()
        ends.wait(30)
        raise StoreError("there is no engine")

    with LLMService(engine, ServiceConfig(state_dir=tmp_path)) as first:
        app = first.bind("mail")
        context = app.new_context("Anna is here.")

        def call():
            with contextlib.suppress(StoreError):
                context.call("Hi")

        def use_and_close():
            for use in (lambda: context.call("Hi"), app.contexts):
                with pytest.raises(StoreError, match="service was closed"):
                    use()
            first.close()

        thread = threading.Thread(target=call)
        thread.start()
        busy.wait()
        assert in_child(use_and_close) == 0
        ends.set()
        thread.join()
        with pytest.raises(StoreError, match="another service uses"):
            service(tmp_path)
        assert app.contexts() == [context]


def test_a_state_folder_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot use service\.state_dir .*file.*\. Set it "):
        service(tmp_path / "file")
    (tmp_path / "contexts.sqlite").write_text("no database, but longer than nothing")
    for _ in range(2):  # a folder that could not be opened is not kept
        with pytest.raises(StoreError, match="not a database"):
            service(tmp_path)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(StoreError, match="No locks available"):
            StateLock(tmp_path)
