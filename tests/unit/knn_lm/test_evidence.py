"""Gains that are remembered: their names, their bounds, their file, and what is erased."""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.mixing import evidence as module
from llmaas_plugins.knn_lm.mixing import evidence_file
from llmaas_plugins.knn_lm.mixing.evidence import ANY_OTHER, Evidence, Prefix
from llmaas_plugins.knn_lm.mixing.trust import LEAST_GAIN, UNJUDGED

DATASTORE, OTHER = b"d" * 32, b"o" * 32
TEXT = np.arange(40, dtype=np.int32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evidence"


@pytest.fixture
def opened(path):
    """Return a function that reads the file anew, as a process that starts."""

    def start(datastore=DATASTORE):
        evidence = Evidence(path)
        evidence.bind(datastore)
        return evidence

    return start


def is_there(_):
    """Return that the datastore is still there."""
    return True


def name(evidence, n=40, app="a", text=TEXT):
    return Prefix(evidence.root(app)).upto(text[:n])


def test_a_text_has_one_name_in_whatever_parts_it_comes(opened):
    evidence = opened()
    for ends in ([40], [1, 2, 40], range(1, 41)):
        prefix = Prefix(evidence.root("a"))
        found = [prefix.upto(TEXT[:end]) for end in ends][-1]
        assert found == name(evidence)
    assert len({name(evidence), name(evidence, 39), name(evidence, app="b")}) == 3
    assert name(evidence, text=TEXT[::-1]) != name(evidence)


def test_a_token_without_a_gain_of_its_own_has_that_of_all_others(opened):
    evidence = opened()
    prefix = name(evidence)
    assert evidence.gain(prefix, 7) is None
    evidence.keep(DATASTORE, prefix, {ANY_OTHER: -0.5, 7: 0.25}, None)
    assert [evidence.gain(prefix, token) for token in (7, 8)] == [0.25, -0.5]
    assert evidence.gain(name(evidence, 39), 7) is None


def test_gains_are_read_after_a_restart(opened):
    evidence = opened()
    gains = {ANY_OTHER: UNJUDGED, 5: LEAST_GAIN, 6: 1.0, 2**31 - 1: -0.1}
    evidence.keep(DATASTORE, name(evidence), gains, "chat")
    evidence.keep(DATASTORE, name(evidence, 20), {3: 0.5}, None)
    evidence.save(is_there)
    later = opened()
    assert len(later) == 5
    assert [later.gain(name(later), token) for token in (5, 6, 2**31 - 1)] == [
        LEAST_GAIN,
        1.0,
        -0.1,
    ]
    assert math.isnan(later.gain(name(later), 4))
    assert later.gain(name(later, 20), 3) == 0.5


def test_another_datastore_has_no_gains(opened, path):
    evidence = opened()
    evidence.keep(DATASTORE, name(evidence), {3: 0.5}, None)
    evidence.save(is_there)
    other = opened(OTHER)
    assert len(other) == 0
    other.keep(OTHER, name(other), {4: 0.5}, None)
    other.save(is_there)
    assert len(opened()) == 0
    evidence.bind(OTHER)
    assert evidence.gain(name(evidence), 3) is None
    assert evidence.gain(name(evidence), 4) == 0.5


def test_two_processes_keep_each_other_s_gains(opened):
    first = opened()
    first.keep(DATASTORE, name(first), {1: 0.1}, "first")
    first.save(is_there)
    one, two = opened(), opened()
    one.keep(DATASTORE, name(one), {2: 0.2}, "one")
    two.keep(DATASTORE, name(two), {3: 0.3}, "two")
    one.save(is_there)
    two.save(is_there)
    later = opened()
    assert [later.gain(name(later), token) for token in (1, 2, 3)] == [0.1, 0.2, 0.3]


def test_a_deleted_context_s_gains_are_erased_and_stay_so(opened, path):
    one = opened()
    one.keep(DATASTORE, name(one), {1: 0.1}, "deleted-context")
    one.keep(DATASTORE, name(one), {2: 0.2}, "kept-context")
    one.save(is_there)
    before, other = path.read_bytes(), opened()
    fd = os.open(path, os.O_RDONLY)
    Evidence(path).forget("deleted-context")  # by a process that has read nothing
    assert b"deleted-context" in before
    assert b"deleted-context" not in os.pread(fd, len(before), 0)
    assert os.fstat(fd).st_ino == path.stat().st_ino
    os.close(fd)
    other.keep(DATASTORE, name(other), {3: 0.3}, "kept-context")
    other.save(is_there)
    later = opened()
    assert [later.gain(name(later), token) for token in (1, 2, 3)] == [None, 0.2, 0.3]
    one.forget("deleted-context")
    assert one.gain(name(one), 1) is None


def test_a_file_that_a_crash_cut_off_is_erased_too(opened, path):
    evidence = opened()
    evidence.keep(DATASTORE, name(evidence), {1: 0.1}, "deleted-context")
    evidence.save(is_there)
    path.write_bytes(path.read_bytes()[:-5])
    Evidence(path).forget("deleted-context")
    assert path.read_bytes() == b""


def test_nothing_is_made_where_nothing_is_erased(path):
    Evidence(path).forget("chat")
    Evidence(path).save(is_there)
    assert not path.exists()


def test_the_oldest_gains_are_dropped_first(opened, monkeypatch):
    monkeypatch.setattr(module, "MOST_GAINS", 8)
    monkeypatch.setattr(evidence_file, "MOST_GAINS", 8)
    evidence = opened()
    prefix = name(evidence)
    evidence.keep(DATASTORE, prefix, {ANY_OTHER: 0.0} | dict.fromkeys(range(7), 0.1), None)
    evidence.keep(DATASTORE, prefix, {0: 0.2}, None)
    evidence.keep(DATASTORE, name(evidence, 1), {1: 0.3, 2: 0.3}, None)
    assert len(evidence) == 8
    assert evidence.gain(prefix, 9) is None  # dropped before those of which it is the rest
    assert [evidence.gain(prefix, token) for token in (0, 1, 2)] == [0.2, None, 0.1]
    evidence.save(is_there)
    assert len(opened()) == 8


def damages(data):
    """Return files that are not what was written, by what is wrong with them."""

    def signed(body):
        return body + hashlib.blake2b(body, digest_size=32).digest()

    body, head = data[:-32], 8 + 64 + 8
    many = body[: head - 4] + np.uint32(evidence_file.MOST_GAINS).tobytes() + body[head:]
    names = body[: head - 8] + b"\xff\xff\xff\x7f" + body[head - 4 :]
    return {
        "empty": b"",
        "cut": data[:-1],
        "a bit": data[:90] + bytes([data[90] ^ 1]) + data[91:],
        "another version": signed(b"LLKNEVD2" + body[8:]),
        "more gains than bytes": signed(many),
        "more names than bytes": signed(names),
        "an impossible gain": signed(body[:-12] + np.float64(1e300).tobytes() + body[-4:]),
        "an unknown context": signed(body[:-4] + np.int32(9).tobytes()),
    }


@pytest.mark.parametrize("damage", damages(bytes(200)))
def test_a_damaged_file_counts_as_empty(opened, path, damage):
    evidence = opened()
    evidence.keep(DATASTORE, name(evidence), {3: 0.5}, "chat")
    evidence.save(is_there)
    path.write_bytes(damages(path.read_bytes())[damage])
    later = opened()
    assert len(later) == 0
    later.keep(DATASTORE, name(later), {3: 0.25}, "chat")
    later.save(is_there)
    again = opened()
    assert again.gain(name(again), 3) == 0.25


def test_a_link_is_not_followed(opened, path, tmp_path, caplog):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    evidence = opened()
    assert "symbolic link" in caplog.text
    evidence.keep(DATASTORE, name(evidence), {3: 0.5}, None)
    evidence.save(is_there)
    with pytest.raises(StoreError, match="symbolic link"):
        evidence.forget("chat")
    assert target.read_bytes() == b"precious"


def test_a_forked_child_writes_nothing(opened, path):
    evidence = opened()
    evidence.keep(DATASTORE, name(evidence), {3: 0.5}, None)
    pid = os.fork()
    if pid == 0:
        evidence.save(is_there)
        os._exit(path.exists())
    assert os.waitpid(pid, 0)[1] == 0
    evidence.save(is_there)
    assert path.stat().st_mode & 0o777 == 0o600
