"""A state folder belongs to one service at a time, that of a server or of an app."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat

import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.claim import Claim
from llmaas_plugins.service.service import LLMService


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


def test_a_state_folder_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot use service\.state_dir .*file"):
        service(tmp_path / "file")
    (tmp_path / "contexts.sqlite").write_text("no database, but longer than nothing")
    for _ in range(2):  # what could not be opened is not kept
        with pytest.raises(StoreError, match="not a database"):
            service(tmp_path)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(StoreError, match="No locks available"):
            Claim(tmp_path)
