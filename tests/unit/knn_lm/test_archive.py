"""The archive: added conversations stay, and forgotten ones are gone for good."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from dataclasses import replace

import fork_server
import numpy as np
import pytest
from archived import BINDING, N_EMBD, assert_holds, fill, record, record_id

from llmaas_hooks import StoreError
from llmaas_plugins.chats.exports import Conversation, Message
from llmaas_plugins.knn_lm.archive import archive as archive_module
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import conversation_id
from llmaas_plugins.knn_lm.archive.segments import Binding

RECORDS = [record(i, n_tokens=n) for i, n in enumerate([9, 2, 300, 1, 0, 40])]


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def small_segments(monkeypatch):
    """Make every second record begin a new segment."""
    monkeypatch.setattr(archive_module, "_MOST_SEGMENT_BYTES", 30_000)


def bytes_of(store):
    return b"".join(path.read_bytes() for path in store.iterdir())


# -- adding and looking -------------------------------------------------------------------------


def test_what_was_added_is_there_at_once_and_after_reopening(store):
    with Archive.open(store, BINDING, writable=True) as archive:
        assert [archive.append(one) for one in RECORDS] == list(range(len(RECORDS)))
        assert_holds(archive, RECORDS)
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, RECORDS)


def test_without_a_model_one_may_look_and_learns_which_it_is_for(store):
    fill(store, RECORDS)
    with Archive.open(store) as archive:
        assert_holds(archive, RECORDS)
        assert archive.binding == BINDING


def test_records_go_on_in_new_segments(store, small_segments):
    fill(store, RECORDS[:4])
    fill(store, RECORDS[4:])
    assert len(list(store.glob("*.segment"))) > 2
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, RECORDS)


def test_any_pairs_come_in_the_order_asked_for(store, small_segments):
    fill(store, RECORDS)
    every = np.concatenate([one.pairs.keys for one in RECORDS])
    values = np.concatenate([one.pairs.values for one in RECORDS])
    rng = np.random.default_rng(0)
    with Archive.open(store, BINDING) as archive:
        for wanted in (
            rng.permutation(len(every)),
            rng.integers(0, len(every), 500),  # some more than once
            np.arange(len(every) - 1, -1, -1),
            np.array([7]),
            np.array([], np.int64),
        ):
            pairs = archive.pairs(wanted)
            assert np.array_equal(pairs.keys, every[wanted])
            assert np.array_equal(pairs.values, values[wanted])


@pytest.mark.parametrize("wanted", [[-1], [0, 400], [[0]]])
def test_pairs_that_are_not_there_are_an_index_error(store, wanted):
    fill(store, RECORDS)
    with Archive.open(store) as archive, pytest.raises(IndexError, match="from 0 to 346"):
        archive.pairs(np.array(wanted))


def test_columns_are_those_of_all_pairs(store):
    fill(store, RECORDS)
    with Archive.open(store) as archive:
        columns = archive.columns()
    for name in ("values", "p_lm", "p_max"):
        wanted = np.concatenate([getattr(one.pairs, name) for one in RECORDS])
        assert np.array_equal(getattr(columns, name), wanted)


def test_token_sequences_are_whole_conversations(store):
    fill(store, RECORDS)
    with Archive.open(store) as archive:
        found = archive.token_sequences()
    assert all(np.array_equal(a, b.tokens) for a, b in zip(found, RECORDS, strict=True))


def test_only_some_tokens_may_be_targets(store):
    one = record(1, n_tokens=30)
    rows = np.array([3, 4, 20])
    some = replace(
        one,
        positions=one.positions[rows],
        pairs=Pairs(*(getattr(one.pairs, n)[rows] for n in ("keys", "values", "p_lm", "p_max"))),
    )
    fill(store, [some])
    with Archive.open(store) as archive:
        assert_holds(archive, [some])


def test_texts_that_no_encoding_has_do_not_stop_it(store):
    one = record(1)
    odd = replace(one.conversation, title="broken \ud800", messages=(Message("user", "\x00\x1b"),))
    fill(store, [replace(one, conversation=odd)])
    with Archive.open(store) as archive:
        assert archive.messages(conversation_id(odd)) == odd.messages


def test_id_is_made_of_app_title_and_messages():
    one = Conversation("t", "a", (Message("user", "x"), Message("assistant", "y")))
    others = [
        Conversation("t", "b", one.messages),
        Conversation("u", "a", one.messages),
        Conversation("t", "a", one.messages[:1]),
        Conversation("t", "a", (Message("user", "x"), Message("user", "y"))),
        Conversation("t", "a", (Message("user", "xy"),)),
    ]
    assert conversation_id(one) == conversation_id(replace(one))
    assert len({conversation_id(c) for c in [one, *others]}) == 6


def test_building_again_can_skip_what_is_in(store):
    fill(store, RECORDS[:2])
    with Archive.open(store, BINDING, writable=True) as archive:
        assert [record_id(one) in archive for one in RECORDS[:3]] == [True, True, False]
        with pytest.raises(ValueError, match="is already in the archive"):
            archive.append(RECORDS[0])
        assert_holds(archive, RECORDS[:2])


def test_what_does_not_belong_together_is_refused(store):
    one = record(1)
    with pytest.raises(ValueError, match="not the tokens at their positions"):
        replace(one, positions=one.positions[::-1].copy())
    with pytest.raises(ValueError, match="one position below 9"):
        replace(one, positions=one.positions + np.int32(1))
    with pytest.raises(ValueError, match="one position below 9"):
        replace(one, positions=one.positions[1:])
    one.pairs.keys[2, 3] = np.inf
    with pytest.raises(ValueError, match="keys has numbers that are not finite"):
        replace(one)
    with pytest.raises(ValueError, match=r"values: found int32 of shape \(7,\), expected"):
        replace(one.pairs, values=one.pairs.values[1:])
    with (
        Archive.open(store, BINDING, writable=True) as archive,
        pytest.raises(ValueError, match="found keys of 8 numbers, expected 24"),
    ):
        archive.append(record(2, n_embd=8))


def test_looking_changes_nothing(store):
    fill(store, RECORDS[:2])
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    with Archive.open(store) as archive:
        with pytest.raises(RuntimeError, match="only for reading"):
            archive.append(RECORDS[3])
        with pytest.raises(RuntimeError, match="only for reading"):
            archive.forget(archive.ids())
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before


def test_an_archive_may_be_empty(store):
    with Archive.open(store, BINDING, writable=True) as archive:
        assert_holds(archive, [])
    with Archive.open(store) as archive:
        assert_holds(archive, [])
        assert archive.binding is None
        assert len(archive.columns().values) == 0


# -- who may ------------------------------------------------------------------------------------


def test_there_must_be_one_to_look_at(tmp_path, store):
    for binding, writable in ((None, False), (BINDING, False), (None, True)):
        with pytest.raises(StoreError, match=r"there is no datastore in .*datastore build"):
            Archive.open(store, binding, writable=writable)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (Binding(b"g" * 32, N_EMBD, "ffn_input"), "expected model 676767676767"),
        (Binding(b"f" * 32, 48, "ffn_input"), "expected model .* ffn_input of 48"),
        (Binding(b"f" * 32, N_EMBD, "final_norm"), "expected model .* final_norm of 24"),
    ],
)
def test_archive_of_another_model_is_refused_and_unchanged(store, other, found):
    fill(store, RECORDS)
    before = bytes_of(store)
    for writable in (False, True):
        with pytest.raises(StoreError, match=found + r".*forget --all"):
            Archive.open(store, other, writable=writable)
    assert bytes_of(store) == before


def test_one_process_writes_others_look_on(store):
    fill(store, RECORDS[:2])
    with Archive.open(store, BINDING, writable=True) as archive:
        with pytest.raises(StoreError, match="is in use by this process already"):
            Archive.open(store, BINDING, writable=True)
        archive.append(RECORDS[2])
        with Archive.open(store, BINDING) as looking:
            assert_holds(looking, RECORDS[:3])
    fill(store, RECORDS[3:])


def test_files_are_private(store):
    store.mkdir(mode=0o755)
    fill(store, RECORDS)
    (store / "datastore.knn.partial").touch(0o600)  # belongs to the selected datastore
    (store / "000000.0.segment").chmod(0o644)
    fill(store, [record(77)])
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.iterdir()} == {0o600}


# -- forgetting ---------------------------------------------------------------------------------


def traces(one):
    """Return bytes that only this conversation has."""
    texts = [message.content.encode() for message in one.conversation.messages]
    id_, title = record_id(one), one.conversation.title.encode() + b'"'
    return [*texts, title, id_, one.tokens.tobytes(), one.pairs.keys[0].tobytes()]


@pytest.mark.parametrize("gone", [[0], [1], [2], [5], [0, 1], [2, 5], [3, 4, 5], [0, 2, 4]])
def test_forgotten_conversations_are_gone_from_every_file(store, small_segments, gone):
    records = [record(i, n_tokens=n) for i, n in enumerate([9, 2, 300, 7, 8, 40])]
    fill(store, records)
    n_before = sum(path.stat().st_size for path in store.glob("*.segment"))
    with Archive.open(store, writable=True) as archive:
        numbers = {info.id: info.number for info in archive.conversations()}
        forgotten = archive.forget([record_id(records[i]) for i in gone])
        kept = [one for i, one in enumerate(records) if i not in gone]
        assert_holds(archive, kept)
        n_after = sum(path.stat().st_size for path in store.glob("*.segment"))
        assert archive.append(record(99)) == len(records)
    assert forgotten.n_conversations == len(gone)
    assert forgotten.n_pairs == sum(len(records[i].pairs) for i in gone)
    assert forgotten.n_bytes == n_before - n_after > 0
    left = bytes_of(store)
    for i in gone:
        assert not any(trace in left for trace in traces(records[i]))
    assert all(trace in left for one in kept for trace in traces(one))
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [*kept, record(99)])
        for info in archive.conversations()[:-1]:
            assert info.number == numbers[info.id]


def test_everything_can_be_forgotten_and_another_model_may_come(store, small_segments):
    fill(store, RECORDS)
    with Archive.open(store, writable=True) as archive:
        archive.forget(archive.ids())
        assert_holds(archive, [])
    assert [path.name for path in store.iterdir()] == ["lock"]
    fill(store, RECORDS[:1], other := Binding(b"g" * 32, N_EMBD, "final_norm"))
    with Archive.open(store) as archive:
        assert archive.binding == other


def test_unknown_ids_are_passed_over(store):
    fill(store, RECORDS)
    before = bytes_of(store)
    with Archive.open(store, writable=True) as archive:
        assert archive.forget([b"?" * 16]).n_conversations == 0
    assert bytes_of(store) == before


def test_a_number_is_never_given_twice(store):
    fill(store, RECORDS)
    for seed in (100, 101, 102):
        with Archive.open(store, BINDING, writable=True) as archive:
            archive.forget(archive.ids()[-1:])
        with Archive.open(store, BINDING, writable=True) as archive:
            assert archive.append(record(seed)) == len(RECORDS) + seed - 100


def test_old_bytes_are_overwritten_before_their_name_goes(store):
    """A reader with the old file open finds zeros, and is told to open it again."""
    fill(store, RECORDS)
    old = (store / "000000.0.segment").open("rb")
    with old, Archive.open(store) as looking:
        with Archive.open(store, writable=True) as archive:
            archive.forget(archive.ids()[:1])
        assert set(old.read()) == {0}
        with pytest.raises(StoreError, match=r"another process has rewritten.*Open .* again"):
            looking.conversations()


def test_opening_to_write_erases_what_a_crash_left(store):
    """Leftover copies of forgotten data are erased without another call to forget."""
    fill(store, RECORDS)
    content = (store / "000000.0.segment").read_bytes()
    (store / "000000.0.segment").rename(store / "000000.12.segment")
    names = ["000000.0.segment", "000000.11.segment", "000000.13.segment.partial"]
    names += ["000000.2.segment.dropped", "000007.0.segment.partial"]
    for name in names:
        (store / name).write_bytes(content)
    before = {path.name for path in store.iterdir()}
    with Archive.open(store) as looking:
        assert_holds(looking, RECORDS)
    assert {path.name for path in store.iterdir()} == before
    left = [(store / name).open("rb") for name in names]
    with Archive.open(store, writable=True) as archive:
        assert_holds(archive, RECORDS)
    assert {path.name for path in store.iterdir()} == {"lock", "000000.12.segment"}
    for file in left:
        with file:
            assert set(file.read()) == {0}


HOLD = """
import sys
from pathlib import Path
from llmaas_plugins.knn_lm.archive.archive import Archive
with Archive.open(Path(sys.argv[1]), writable=True) as archive:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_who_holds_it_is_named_and_forgotten_when_it_dies(store):
    fill(store, RECORDS)
    command = [sys.executable, "-c", HOLD, str(store)]
    with fork_server.Process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"datastore .* is in use by process {holder.pid}"):
            Archive.open(store, BINDING, writable=True)
        holder.kill()
    fill(store, [record(55)])


def test_disk_that_fails_while_forgetting_closes_it_and_loses_nothing(store, monkeypatch):
    fill(store, RECORDS)
    pwrite = os.pwrite

    def failing(fd, data, at):
        if not any(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(fd, data, at)

    with Archive.open(store, BINDING, writable=True) as archive:
        monkeypatch.setattr(os, "pwrite", failing)  # prevents overwriting with zeros
        with pytest.raises(StoreError, match=r"cannot forget in datastore .*: Input/output error"):
            archive.forget(archive.ids()[:1])
        with pytest.raises(RuntimeError, match="only for reading"):
            archive.append(record(50))
        assert archive.ids() == []
    with pytest.raises(StoreError, match=r"cannot open datastore .*: Input/output error"):
        Archive.open(store, BINDING, writable=True)
    monkeypatch.undo()
    fill(store, [record(50)])
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [*RECORDS[1:], record(50)])
    assert not any(trace in bytes_of(store) for trace in traces(RECORDS[0]))
