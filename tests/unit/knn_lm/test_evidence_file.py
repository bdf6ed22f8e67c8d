"""The file of gains: who may use it at a time, how much it holds, and which gains are not in it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import write
from llmaas_plugins.files.store_lock import try_lock
from llmaas_plugins.knn_lm.mixing import evidence as module
from llmaas_plugins.knn_lm.mixing import evidence_file
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.evidence_file import EvidenceFile, Kept, Stored

DATASTORE, OTHER = b"d" * 32, b"o" * 32
ONE, TWO = b"1" * 16, b"2" * 16
"""Names of texts."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evidence"


@pytest.fixture
def opened(path):
    """Return a function that reads the file anew, as a process that starts."""

    def start(datastore=DATASTORE):
        evidence = Evidence(path)
        assert evidence.bind(datastore)
        return evidence

    return start


@pytest.fixture
def short_wait(monkeypatch):
    monkeypatch.setattr(evidence_file, "_LOCK_S", 0.05)


def is_there(_):
    """Return that the datastore is still there."""
    return True


def held(path):
    """Lock the file as another process would; return the descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert try_lock(fd)
    return fd


def saved(opened, *contexts):
    """Save a gain for each context."""
    evidence = opened()
    for i, context in enumerate(contexts):
        evidence.keep(DATASTORE, ONE, {i: 0.5}, context)
    evidence.save(is_there)
    return evidence


@pytest.mark.usefixtures("short_wait")
def test_a_child_forked_meanwhile_does_not_keep_the_file_locked(path):
    with EvidenceFile.locked(path, creates=True):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with EvidenceFile.locked(path) as file:
            assert file is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_gains_of_contexts_without_any_in_the_file_are_not_read(opened, path, monkeypatch):
    saved(opened, "some-context")

    def parse(_):
        raise AssertionError("all gains were read")

    monkeypatch.setattr(Stored, "parse", parse)
    Evidence(path).forget("other-context")
    with pytest.raises(AssertionError, match="all gains"):
        Evidence(path).forget("some-context")


@pytest.mark.parametrize("work", ["forget", "save", "bind"])
def test_answers_do_not_wait_for_the_file(opened, path, monkeypatch, work):
    evidence = saved(opened, "some-context")
    evidence.keep(DATASTORE, ONE, {7: 0.25}, None)
    does = {
        "forget": lambda: evidence.forget("some-context"),
        "save": lambda: evidence.save(is_there),
        "bind": lambda: evidence.bind(OTHER),
    }
    waits = threading.Event()

    def try_to_lock(fd):
        waits.set()
        return try_lock(fd)

    monkeypatch.setattr(evidence_file, "try_lock", try_to_lock)
    fd = held(path)
    thread = threading.Thread(target=does[work])
    thread.start()
    assert waits.wait(10)
    evidence.keep(DATASTORE, TWO, {1: 0.5}, None)
    found = evidence.gain(ONE, 7), evidence.gain(TWO, 1)
    assert thread.is_alive()  # it still waits for the other process
    assert found == ((None, None) if work == "bind" else (0.25, 0.5))
    os.close(fd)
    thread.join()


@pytest.mark.usefixtures("short_wait")
def test_a_file_that_cannot_be_read_now_is_not_replaced(opened, path, caplog, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0)
    saved(opened, None)
    evidence, fd = Evidence(path), held(path)
    for _ in range(3):
        assert not evidence.bind(DATASTORE)
    assert caplog.text.count("past judgments of the datastore are not read") == 1
    evidence.keep(DATASTORE, TWO, {1: 0.5}, None)
    os.close(fd)
    evidence.save(is_there)
    assert opened().gain(ONE, 0) == 0.5
    assert evidence.bind(DATASTORE)
    assert evidence.gain(ONE, 0) == 0.5


@pytest.mark.usefixtures("short_wait")
def test_requests_do_not_all_wait_for_a_file_that_another_process_holds(opened, path):
    saved(opened, None)
    evidence, fd, began = Evidence(path), held(path), time.monotonic()
    for _ in range(100):
        assert not evidence.bind(DATASTORE)
    assert time.monotonic() - began < 2.5  # 100 waits take 5 s
    os.close(fd)
    while not evidence.bind(DATASTORE):
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    assert evidence.gain(ONE, 0) == 0.5


def test_gains_of_another_datastore_are_not_kept(opened):
    evidence = opened()
    assert evidence.bind(OTHER)
    evidence.keep(DATASTORE, ONE, {0: 0.5}, None)  # for a request that began before
    assert len(evidence) == 0


@pytest.mark.parametrize("when", ["before the file is opened", "while the file is locked"])
def test_gains_of_a_datastore_that_is_gone_are_not_saved(opened, path, when):
    evidence = opened()
    evidence.keep(DATASTORE, ONE, {0: 0.5}, None)
    asked = []

    def is_there(digest):
        asked.append(digest)
        return when == "while the file is locked" and len(asked) == 1

    evidence.save(is_there)
    assert set(asked) == {DATASTORE}
    assert not path.exists() or path.read_bytes() == b""


def test_a_request_without_a_context_leaves_gains_to_theirs(opened, path):
    evidence = saved(opened, "some-context")
    later = opened()
    for one in (evidence, later):
        one.keep(DATASTORE, ONE, {0: 0.25}, None)
    path.unlink()
    evidence.save(is_there)  # it knows the gain from before
    later.save(is_there)
    last = Evidence(path)
    last.forget("some-context")
    assert len(opened()) == 0
    evidence.forget("some-context")
    assert len(evidence) == 0


def test_a_gain_is_left_to_its_context_by_a_process_that_did_not_know_it(opened, path):
    unaware = saved(opened, None)
    aware = opened()
    unaware.keep(DATASTORE, TWO, {0: 0.25}, None)
    aware.keep(DATASTORE, TWO, {0: 0.25}, "some-context")
    aware.save(is_there)
    unaware.save(is_there)
    Evidence(path).forget("some-context")
    assert opened().gain(TWO, 0) is None


def test_as_many_gains_are_written_as_can_be_read(opened, path):
    evidence, names = opened(), [f"{i:060000}" for i in range(300)]
    for i, context in enumerate(names):
        evidence.keep(DATASTORE, ONE, {i: 0.5}, context)
    evidence.save(is_there)
    later = opened()
    assert 250 < len(later) < 300
    assert (later.gain(ONE, 0), later.gain(ONE, 299)) == (None, 0.5)
    later.forget(names[299])
    assert names[299].encode() not in path.read_bytes()
    assert opened().gain(ONE, 298) == 0.5


def test_a_file_of_more_gains_than_are_kept_counts_as_damaged(monkeypatch):
    gains = {bytes([i]) * 16: Kept(0.5, None) for i in range(9)}
    content = Stored(DATASTORE, bytes(32), gains).pack()
    assert Stored.parse(content) == Stored(DATASTORE, bytes(32), gains)
    monkeypatch.setattr(evidence_file, "MOST_GAINS", 8)
    assert Stored.parse(content) is None


def test_a_file_that_others_made_huge_is_erased_in_little_memory(path):
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)
    Evidence(path).forget("some-context")
    assert path.stat().st_size == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("torn", ["evidence.partial", "evidence"])
def test_a_kill_while_the_file_is_written_leaves_one_of_both_contents(
    opened, path, monkeypatch, torn, share
):
    saved(opened, "some-context")
    evidence, n_writes = opened(), 0
    evidence.keep(DATASTORE, TWO, {1: 0.25}, "some-context")

    def write_in_part(fd, data, at):
        nonlocal n_writes
        n_writes += 1
        if n_writes == ["evidence.partial", "evidence"].index(torn) + 1:
            write(fd, data[: int(share * len(data))], at)
            raise KeyboardInterrupt  # nothing after it is done
        write(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(evidence_file, "write", write_in_part)
        with pytest.raises(KeyboardInterrupt):
            evidence.save(is_there)
    later = opened()
    assert later.gain(ONE, 0) == 0.5
    has_new = torn == "evidence" or share == 1.0
    assert later.gain(TWO, 1) == (0.25 if has_new else None)
    later.forget("some-context")
    assert [one.name for one in path.parent.iterdir()] == ["evidence"]
    assert b"some-context" not in path.read_bytes()


def test_a_gain_that_changes_while_it_is_saved_is_saved_again(opened, monkeypatch):
    evidence = opened()
    evidence.keep(DATASTORE, ONE, {0: 0.5}, None)
    store = EvidenceFile.store

    def store_late(file, stored):
        evidence.keep(DATASTORE, ONE, {0: 0.25}, None)
        store(file, stored)

    with monkeypatch.context() as patch:
        patch.setattr(EvidenceFile, "store", store_late)
        evidence.save(is_there)
    assert opened().gain(ONE, 0) == 0.5
    evidence.save(is_there)
    assert opened().gain(ONE, 0) == 0.25


@pytest.mark.usefixtures("short_wait")
def test_who_waits_for_too_long_is_told(path):
    fd = held(path)
    with pytest.raises(StoreError, match="in use by another process"):
        Evidence(path).forget("some-context")
    os.close(fd)
