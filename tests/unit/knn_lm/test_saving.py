"""Gains are saved while requests run, on a thread of its own, as long as there is something new."""

from __future__ import annotations

import threading
import time

import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.mixing import saving as module
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.saving import Saving

DATASTORE, TEXT = b"d" * 32, b"1" * 16


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.05)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def threads():
    return [one for one in threading.enumerate() if one.name == "llmaas-knn-save"]


@pytest.mark.usefixtures("soon")
def test_gains_are_in_the_file_soon_and_then_the_thread_ends(tmp_path):
    path = tmp_path / "evidence"
    saving = Saving(lambda: evidence.save(lambda _: True))
    evidence = Evidence(path, saving.changed)
    evidence.bind(DATASTORE)
    for token in range(3):
        evidence.keep(DATASTORE, TEXT, {token: 0.5}, None)
        assert len(threads()) == 1
        until(lambda: not threads())
        later = Evidence(path)
        later.bind(DATASTORE)
        assert len(later) == token + 1
    saving.close()
    evidence.keep(DATASTORE, TEXT, {9: 0.5}, None)
    assert not threads()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", [StoreError, ValueError])
def test_a_save_that_fails_is_tried_again_and_logged_once(caplog, kind):
    n_tries = 0

    def save():
        nonlocal n_tries
        n_tries += 1
        if n_tries < 3:
            raise kind("the disk is full")

    saving = Saving(save)
    saving.changed()
    until(lambda: not threads())
    assert n_tries == 3
    assert len([one for one in caplog.records if "the disk is full" in one.getMessage()]) == 1


@pytest.mark.usefixtures("soon")
def test_what_changes_during_a_save_is_saved_by_the_next_one():
    tries = []

    def save():
        tries.append(threading.current_thread())
        if len(tries) == 1:
            saving.changed()

    saving = Saving(save)
    saving.changed()
    until(lambda: not threads())
    assert len(set(tries)) == 1
    assert len(tries) == 2


def test_a_reply_waits_for_no_save(monkeypatch):
    is_saving, may_end = threading.Event(), threading.Event()

    def save():
        is_saving.set()
        assert may_end.wait(10)

    monkeypatch.setattr(module, "EVERY_S", 0.0)
    saving = Saving(save)
    saving.changed()
    assert is_saving.wait(10)
    saving.changed()  # returns at once
    saving.close()
    may_end.set()
    until(lambda: not threads())
