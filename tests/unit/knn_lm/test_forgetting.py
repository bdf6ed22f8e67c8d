"""Forgetting chats, stopped at any point: no chat is half there, and forgetting can be repeated."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from archived import BINDING, assert_holds, fill, record, record_id, select

from llmaas_hooks import StoreError
from llmaas_plugins.chats.exports import NO_APP, load_conversations
from llmaas_plugins.cli.interrupts import Stopped
from llmaas_plugins.cli.main import main
from llmaas_plugins.knn_lm.archive import files
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import EVIDENCE, SELECTED
from llmaas_plugins.knn_lm.build import inbox
from llmaas_plugins.knn_lm.build.inbox import remember, waiting_files
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.summary import read_summary
from llmaas_plugins.knn_lm.mixing import evidence_file
from llmaas_plugins.knn_lm.mixing.evidence import Evidence
from llmaas_plugins.knn_lm.mixing.evidence_file import EvidenceFile

GONE = [record(1), record(3, n_tokens=40)]
WAITS = record(4)
STAYS = [record(0, app="notes"), record(2, app="notes")]
STEPS = [(os, "fsync"), (Path, "rename"), (Path, "unlink")]


@pytest.fixture
def store(tmp_path):
    """Return chats of two apps: archived, selected, and waiting, some together in one file."""
    store = tmp_path / "store"
    fill(store, [STAYS[0], *GONE, STAYS[1]])
    select(store, *((one, [0, 2]) for one in [*STAYS, *GONE]))
    for one, app in ((WAITS, "mail"), (STAYS[0], "notes"), (WAITS, "mail")):
        remember(store, one.conversation.messages, title=one.conversation.title, app=app)
    first, second, _ = waiting_files(store)
    first.write_bytes(first.read_bytes() + second.read_bytes())
    return store


def forget(store):
    return main(["datastore", "forget", "--store", str(store), "--app", "mail"])


def found_in(store, one):
    """Return the parts of a chat that are in any byte of the folder."""
    content = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    texts = [message.content.encode() for message in one.conversation.messages]
    traces = [*texts, record_id(one), *(key.tobytes() for key in one.pairs.keys)]
    return [trace for trace in traces if trace in content]


def look(store):
    """Assert that every chat is wholly there or not at all."""
    with Archive.open(store) as archive:
        known = {record_id(one): one for one in [*STAYS, *GONE]}
        found = [known[id_] for id_ in archive.ids()]
        assert_holds(archive, found)
    assert all(one in found for one in STAYS)
    read_summary(store)


def forget_again(store):
    look(store)
    assert forget(store) in (0, 2)  # 2: no such chat
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, STAYS)
    selected = read_summary(store)
    assert [len(selected.positions_in(record_id(one).hex())) for one in STAYS] == [2, 2]
    left = [one.messages for path in waiting_files(store) for one in load_conversations(path)]
    assert left.count(STAYS[0].conversation.messages) >= 2
    assert not any(found_in(store, one) for one in [*GONE, WAITS])


def at_each_step(monkeypatch, act):
    """Call ``act(number)`` before and after each step that changes files."""
    n_steps = 0

    def watched(original):
        def step(*args, **options):
            nonlocal n_steps
            n_steps += 1
            act(2 * n_steps - 1)
            found = original(*args, **options)
            act(2 * n_steps)
            return found

        return step

    for kind, name in STEPS:
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))


@pytest.mark.slow
def test_killed_at_any_point(store, tmp_path):
    """Each state that a kill would leave is copied and opened later."""
    copies = []

    def copy(number):
        copies.append(shutil.copytree(store, tmp_path / f"killed-{number}"))

    with pytest.MonkeyPatch.context() as patch:
        at_each_step(patch, copy)
        assert forget(store) == 0
    assert len(copies) > 40
    for left in copies:
        forget_again(left)


def test_killed_while_a_chat_was_being_remembered(store, tmp_path):
    copies = []

    def copy(number):
        copies.append(shutil.copytree(store, tmp_path / f"killed-{number}"))

    one = record(5)
    with pytest.MonkeyPatch.context() as patch:
        at_each_step(patch, copy)
        remember(store, one.conversation.messages, app="mail")
    for left in copies:
        assert forget(left) == 0
        assert not found_in(left, one)


@pytest.fixture
def run(capsys, tmp_path):
    """Return a function that runs an action on two chats; it returns the report, or the error."""
    store = tmp_path / "store"
    fill(store, [GONE[0], STAYS[0]])

    def run(action, *args, form="--json"):
        code = main(["datastore", action, *filter(None, [form]), "--store", str(store), *args])
        found = capsys.readouterr()
        return found.err if code else json.loads(found.out) if form else found.out

    return run, store


def test_an_app_may_have_the_name_that_stands_for_none(run):
    run, store = run
    own = record(7, app=NO_APP)
    nobodys = replace(own, conversation=replace(own.conversation, is_shared=True))
    assert record_id(own) != record_id(nobodys)
    fill(store, [nobodys])
    found = run("forget", "--app", NO_APP)
    assert "Known apps: mail, notes. `--no-app` forgets those that name none." in found
    fill(store, [own])
    found = run("stats")
    assert (found["apps"][NO_APP], found["without_app"]) == (1, 1)
    assert "chat: 1, none: 1\n" in run("stats", form=None)
    assert [row["app"] for row in run("inspect")["conversations"]][2:] == [None, NO_APP]
    assert run("inspect", form=None).splitlines()[3].split()[2] == "-"
    for app in (NO_APP, None):
        remember(store, own.conversation.messages, title="waits", app=app)
    assert run("forget", "--app", NO_APP)["n_conversations"] == 2
    (left,) = waiting_files(store)
    assert load_conversations(left)[0].is_shared
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [GONE[0], STAYS[0], nobodys])
    assert run("forget", "--no-app")["n_conversations"] == 2
    assert "no conversation that names no app; nothing was changed" in run("forget", "--no-app")


def test_files_that_cannot_be_read_are_named_because_they_stay(run):
    run, store = run
    (store / "inbox").mkdir()
    paths = [store / "inbox" / name for name in ("a.json.refused", "b.jsonl")]
    for path in paths:
        path.write_text("no chats\n")
    assert run("forget", "--app", "mail")["unread"] == [*map(str, paths)]
    text = run("forget", "--app", "notes", form=None)
    assert all(f"{path} is no chat export" in text and path.exists() for path in paths)


@pytest.mark.parametrize(("limit", "most"), [("_MOST_FILES", 2), ("_MOST_BYTES", 300)])
def test_only_so_many_remembered_chats_wait(tmp_path, monkeypatch, limit, most):
    monkeypatch.setattr(inbox, limit, most)
    said = record(1).conversation.messages
    waiting = [remember(tmp_path, said) for _ in range(2)]
    (tmp_path / "inbox" / "mine.json").write_text(" " * 400)  # the user's own does not count
    with pytest.raises(StoreError, match=r"2 conversations of 0 MiB wait in .* Set learn = true"):
        remember(tmp_path, said)
    waiting.pop().unlink()
    remember(tmp_path, said)


def test_a_full_disk_keeps_nothing_of_a_chat(tmp_path, monkeypatch):
    n_written = 0

    def full(fd, data, at):
        nonlocal n_written
        n_written += os.pwrite(fd, bytes(data)[:20], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = record(1).conversation.messages
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(StoreError, match="No space left"):
            remember(tmp_path, said)
    assert n_written > 0
    assert list((tmp_path / "inbox").iterdir()) == []
    remember(tmp_path, said)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "inbox").touch()
    with pytest.raises(StoreError, match="cannot use"):
        remember(tmp_path / "other", said)


def test_gains_that_a_process_writes_meanwhile_are_erased(store, monkeypatch):
    """They tell how well the pairs that are forgotten predicted."""
    digests, without = [], Datastore.without

    def save():
        opened = Datastore.open(store / SELECTED, None)
        digests.append(opened.digest)
        evidence = Evidence(store / EVIDENCE)
        assert evidence.bind(digests[0])
        evidence.keep(digests[0], bytes(16), {1: 0.5}, None)
        evidence.save(lambda digest: digest == opened.digest)
        opened.close()

    def without_in_the_middle(*args):
        save()
        assert digests[0] in (store / EVIDENCE).read_bytes()
        removed = without(*args)
        save()
        return removed

    monkeypatch.setattr(Datastore, "without", staticmethod(without_in_the_middle))
    assert forget(store) == 0
    save()
    assert len(set(digests)) == 2
    assert (store / EVIDENCE).read_bytes() == b""


@pytest.mark.parametrize("what", [["--app", "mail"], ["--all"]])
def test_gains_are_erased_when_no_process_is_writing_them(store, what, monkeypatch, capsys):
    (store / EVIDENCE).write_bytes(b"gains")
    monkeypatch.setattr(evidence_file, "_LOCK_S", 0.05)
    forgetting = ["datastore", "forget", "--store", str(store), *what]
    with EvidenceFile.locked(store / EVIDENCE):
        assert main(forgetting) != 0
    assert "evidence is in use by another process" in capsys.readouterr().err
    assert (store / EVIDENCE).read_bytes() == b"gains"
    assert main(forgetting) == 0
    assert not (store / EVIDENCE).exists() or (store / EVIDENCE).read_bytes() == b""


def test_what_is_being_written_by_others_meanwhile_stays(store):
    def forgetting(number):
        if number == 1:  # the text is in a partial file
            assert forget(store) == 0

    with pytest.MonkeyPatch.context() as patch:
        at_each_step(patch, forgetting)
        path = remember(store, record(5).conversation.messages, app="notes")
    (left,) = load_conversations(path)
    assert left.messages == record(5).conversation.messages


@pytest.mark.slow
def test_stopped_by_sigterm_at_any_point(store, tmp_path, capsys):
    """The signal raises an error at that point, and the files are closed on the way out."""
    n_stopped = 0
    while True:
        left = shutil.copytree(store, tmp_path / f"stopped-{n_stopped}")

        def stop(number, last=n_stopped + 1):
            if number == last:
                raise Stopped(signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch:
            at_each_step(patch, stop)
            code = forget(left)
        if code == 0:
            break
        assert code == 128 + signal.SIGTERM
        assert "repeat the command to forget the rest" in capsys.readouterr().err
        n_stopped += 1
        forget_again(left)
    assert n_stopped > 40


def test_an_export_that_is_still_being_copied_loses_nothing(store, capsys):
    """The first lines alone are an export, too."""
    path = store / "inbox/export.jsonl"
    rows = [
        {"app": app, "messages": [{"role": "user", "content": f"what {app} said"}]}
        for app in ("mail", "notes")
    ]
    with path.open("w") as copy:
        print(json.dumps(rows[0]), file=copy, flush=True)
        assert forget(store) != 0
        assert "export.jsonl is being written by another process" in capsys.readouterr().err
        print(json.dumps(rows[1]), file=copy)
    assert forget(store) == 0
    left = [one.messages for path in waiting_files(store) for one in load_conversations(path)]
    said = {message.content for messages in left for message in messages}
    assert "what notes said" in said
    assert "what mail said" not in said
