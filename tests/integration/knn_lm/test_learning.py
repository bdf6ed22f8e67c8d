"""Waiting conversations are learned while the device is idle, and selected as they arrive."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import numpy as np
import pytest
from datastores import CONVERSATIONS, ENGINE, QUESTIONS, Natives, filling
from llama_cpp import Llama
from served import wait_until

from llmaas_hooks import ConfigError
from llmaas_plugins import activate, process_memory
from llmaas_plugins.chats.exports import Conversation, Message, load_conversations
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import INBOX, ONLINE, SELECTED
from llmaas_plugins.knn_lm.build import learner as learning_module
from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.forget import forget_all
from llmaas_plugins.knn_lm.build.inbox import (
    erase_learned,
    is_complete,
    refuse,
    remember,
    waiting_files,
)
from llmaas_plugins.knn_lm.build.ingest import add_conversations, tokens_of
from llmaas_plugins.knn_lm.build.update_datastore import is_update_due, update_datastore

CHATS = [
    Conversation(f"{one.title} {i}", "chat", one.messages)
    for i in range(3)
    for one in CONVERSATIONS
]
PLAN = SelectionParams(size=150, n_dims=64)


def leave(store, chats):
    for one in chats:
        remember(store, one.messages, title=one.title)


@contextlib.contextmanager
def learning(store, model, **table):
    """Open an app whose device counts as idle at once."""
    own = {"store": str(store), "learn": True, "idle_s": 0.01} | table
    with (
        activate({"on_error": "raise", "plugins": {"knn_lm": own}}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
    ):
        yield suite, llama


def ask(llama, n=4):
    prompt = llama.tokenize(f"User: {QUESTIONS[0]}\nAssistant:".encode(), special=True)
    return [token for token, _ in zip(llama.generate(prompt, temp=0.0), range(n), strict=False)]


def report(suite):
    return suite.status()["plugins"]["knn_lm"]


@pytest.mark.slow
def test_what_waits_is_learned_and_then_mixed(tmp_path, reference_model):
    leave(tmp_path, CONVERSATIONS)
    with learning(tmp_path, reference_model) as (suite, llama):
        ask(llama)
        wait_until((tmp_path / SELECTED).exists)
        wait_until(lambda: not waiting_files(tmp_path))
        before = report(suite)
        ask(llama)
        after = report(suite)
    assert (before["learned"], before["mixed"]) == (len(CONVERSATIONS), 0)
    assert after["mixed"] + after["skipped"] > 0
    with Archive.open(tmp_path) as archive:
        assert {row.title for row in archive.conversations()} == {c.title for c in CONVERSATIONS}


class Short:
    """Limit of the process that leaves little room until it is lifted."""

    held_bytes = 0

    def __init__(self):
        self.left = 1 << 20

    def room(self):
        return self.left

    def grant(self, n_bytes):
        return min(n_bytes, self.left)

    def enforce(self, *, waits):
        del waits


@pytest.mark.slow
def test_selection_waits_for_memory(tmp_path, reference_model):
    """Conversations stay learned, and are selected once others leave the memory for it."""
    leave(tmp_path, CONVERSATIONS[:2])
    short = Short()
    process_memory.add_limit(short)
    with learning(tmp_path, reference_model) as (suite, llama):
        ask(llama)
        wait_until(lambda: report(suite)["learning_error"])
        before = report(suite)
        assert (before["learned"], before["waiting"]) == (2, 0)
        assert "selecting what was learned takes up to" in before["learning_error"]
        assert not (tmp_path / SELECTED).exists()
        short.left = 1 << 30
        wait_until((tmp_path / SELECTED).exists)
        wait_until(lambda: report(suite)["learning_error"] is None)


@pytest.mark.slow
def test_only_a_model_whose_files_are_known_is_learned_with(tmp_path, reference_model, monkeypatch):
    used, real = set(), learning_module.binding_of

    def binding_of(llama, *args):
        used.add(llama)
        return real(llama, *args)

    monkeypatch.setattr(learning_module, "binding_of", binding_of)
    with (
        contextlib.closing(Llama(str(reference_model), **ENGINE)) as older,
        learning(tmp_path, reference_model) as (_, llama),
    ):
        ask(older)
        ask(llama)
        leave(tmp_path, CONVERSATIONS[:1])
        wait_until(lambda: not waiting_files(tmp_path))
        assert used == {llama}


def test_what_is_learned_is_no_prompt_and_needs_no_cells_of_parked_contexts(
    tmp_path, reference_model
):
    natives = Natives()
    kv_chunks = {"store": str(tmp_path / "kv"), "parked_tokens": 256}
    config = {"on_error": "raise", "plugins": {"kv_chunks": kv_chunks}}
    with (
        activate(config, {"natives": natives}) as suite,
        contextlib.closing(Llama(str(reference_model), **ENGINE)) as llama,
    ):
        ask(llama)
        before = suite.status()["plugins"]["kv_chunks"]["evaluated_tokens"]
        with Encoder(llama, natives.by_ctx, "ffn_input", n_batch=32) as encoder:
            encoder.encode(tokens_of(llama, CONVERSATIONS[0]))
            (ctx,) = natives.by_ctx.keys() - {int(llama.ctx)}
            n_cells = natives.by_ctx[ctx].cells().n
        assert suite.status()["plugins"]["kv_chunks"]["evaluated_tokens"] == before > 0
    assert n_cells == ENGINE["n_ctx"]


def test_nothing_is_learned_unless_it_is_asked_for(tmp_path, reference_model):
    leave(tmp_path, CONVERSATIONS[:1])
    with learning(tmp_path, reference_model, learn=False) as (suite, llama):
        ask(llama)
        assert report(suite)["waiting"] == 1
    assert not [thread for thread in threading.enumerate() if "knn" in thread.name]


@pytest.mark.slow
def test_a_file_that_is_no_export_is_put_aside(tmp_path, reference_model, caplog):
    leave(tmp_path, CONVERSATIONS[:1])
    odd = tmp_path / INBOX / "0.json"
    odd.write_text("not a chat")
    os.utime(odd, (0, 0))  # nobody is writing to it
    with learning(tmp_path, reference_model) as (suite, llama):
        ask(llama)
        wait_until(lambda: not waiting_files(tmp_path))
        assert report(suite)["learned"] == 1
    assert [path.name for path in (tmp_path / INBOX).iterdir()] == ["0.json.refused"]
    assert "it is kept as 0.json.refused" in caplog.text


def test_files_that_are_put_aside_replace_no_earlier_ones(tmp_path):
    found = []
    for text in ("first", "second", "third"):
        (tmp_path / "a.json").write_text(text)
        found.append(refuse(tmp_path / "a.json"))
    assert [path.name for path in found] == [
        "a.json.refused",
        "a.json.2.refused",
        "a.json.3.refused",
    ]
    assert [path.read_text() for path in found] == ["first", "second", "third"]
    (tmp_path / "folder.json").mkdir()
    assert refuse(tmp_path / "folder.json").is_dir()
    assert len(list(tmp_path.iterdir())) == 4
    (tmp_path / ("a" * 250 + ".json")).write_text("fourth")
    assert refuse(tmp_path / ("a" * 250 + ".json")).name == "a" * 247 + ".refused"


@pytest.mark.slow
def test_an_export_that_is_copied_while_it_is_learned_is_learned_whole(
    tmp_path, reference_model, monkeypatch
):
    leave(tmp_path, CONVERSATIONS[:1])
    leave(tmp_path / "other", CONVERSATIONS[1:2])
    (path,), (other,) = waiting_files(tmp_path), waiting_files(tmp_path / "other")
    text, rest = path.read_bytes(), other.read_bytes()
    path.write_bytes(text[:-20])  # the part that was copied so far
    steps = iter([lambda: path.write_bytes(text), lambda: path.write_bytes(text + rest)])

    def meanwhile(function):
        def wrapped(*args, **kwargs):
            next(steps, lambda: None)()
            return function(*args, **kwargs)

        return wrapped

    def load(path):
        try:
            return load_conversations(path)
        except ConfigError:
            next(steps)()
            raise

    monkeypatch.setattr(learning_module, "load_conversations", load)
    monkeypatch.setattr(learning_module, "add_conversations", meanwhile(add_conversations))
    with learning(tmp_path, reference_model) as (_, llama):
        ask(llama)
        wait_until(lambda: not waiting_files(tmp_path))
    assert not list((tmp_path / INBOX).iterdir())
    with Archive.open(tmp_path) as archive:
        assert {row.title for row in archive.conversations()} == {
            c.title for c in CONVERSATIONS[:2]
        }


@pytest.mark.slow
@pytest.mark.parametrize("n_left", [0, 20])
def test_a_copy_that_stalls_is_learned_whole(tmp_path, reference_model, n_left):
    """The first lines may be a valid export or not; the learner must leave the file alone."""
    leave(tmp_path / "other", CONVERSATIONS[1:3])
    text, rest = (path.read_bytes() for path in waiting_files(tmp_path / "other"))
    leave(tmp_path, CONVERSATIONS[:1])
    path = tmp_path / INBOX / "0.jsonl"  # examined first
    with learning(tmp_path, reference_model) as (_, llama):
        with path.open("wb", buffering=0) as file:
            file.write(text[: len(text) - n_left])
            os.utime(path, (time.time() - 60,) * 2)
            ask(llama)
            wait_until(lambda: waiting_files(tmp_path) == [path])
            file.write(text[len(text) - n_left :] + rest)
        os.utime(path, (time.time() - 60,) * 2)
        wait_until(lambda: not waiting_files(tmp_path))
    assert not list((tmp_path / INBOX).iterdir())
    with Archive.open(tmp_path) as archive:
        titles = {row.title for row in archive.conversations()}
    assert titles == {one.title for one in CONVERSATIONS[:3]}


def test_which_files_are_whole(tmp_path):
    leave(tmp_path, CONVERSATIONS[:1])
    (own,) = waiting_files(tmp_path)
    path = own.with_name("export.jsonl")
    path.write_bytes(own.read_bytes())
    assert is_complete(own)
    assert not is_complete(path)  # somebody may write more
    assert not is_complete(path.with_name("none.jsonl"))
    with path.open("ab"):
        os.utime(path, (time.time() - 60,) * 2)
        assert not is_complete(path)
        os.utime(path, (time.time() - 7200,) * 2)
        assert is_complete(path)
    os.utime(path, (time.time() - 60,) * 2)
    assert is_complete(path)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["llama", "suite"])
def test_an_app_that_ends_meanwhile_waits_for_one_batch(tmp_path, reference_model, ends):
    """Conversations that were not learned wait for the next start."""
    long = Message("user", "word " * 200)
    leave(tmp_path, [Conversation(f"long {i}", "chat", (long,)) for i in range(30)])
    with learning(tmp_path, reference_model) as (suite, llama):
        ask(llama)
        wait_until(lambda: report(suite)["learned"] > 0)
        if ends == "llama":
            llama.close()
            assert report(suite)["learned"] < 30
    with Archive.open(tmp_path) as archive:
        assert 0 < len(archive) < 30
        # one may be learned but not yet erased
        assert len(archive) + len(waiting_files(tmp_path)) in (30, 31)


@pytest.mark.slow
def test_a_request_stops_the_work_until_it_is_over(tmp_path, reference_model):
    with learning(tmp_path, reference_model) as (suite, llama):
        prompt = llama.tokenize(b"Once upon a time")
        stream = llama.generate(prompt, temp=0.0)
        next(stream)
        leave(tmp_path, CONVERSATIONS[:1])
        with pytest.raises(AssertionError):
            wait_until(lambda: report(suite)["learned"] > 0, seconds=2.5)
        stream.close()
        wait_until(lambda: report(suite)["learned"] > 0)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_an_export_that_is_linked_into_the_inbox_stays_as_it_is(tmp_path, link):
    own, name = tmp_path / "own.jsonl", tmp_path / INBOX / "own.jsonl"
    own.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    before = own.read_bytes()
    name.parent.mkdir()
    getattr(name, link)(own)
    assert waiting_files(tmp_path) == [name]
    erase_learned(name)
    assert own.read_bytes() == before
    assert list(name.parent.iterdir()) == []


def test_a_conversation_needs_messages(tmp_path):
    with pytest.raises(ConfigError, match="without messages"):
        remember(tmp_path, [])
    assert not waiting_files(tmp_path)


def test_all_that_waits_is_forgotten_too(tmp_path):
    leave(tmp_path, CONVERSATIONS)
    with Archive.open(tmp_path, writable=True):
        pass
    forget_all(tmp_path)
    assert list((tmp_path / INBOX).iterdir()) == []


# -- selecting as they come ----------------------------------------------------------------------


@pytest.fixture
def growing(tmp_path, reference_model):
    """Return an archive that grows by conversations."""
    with filling(reference_model, tmp_path) as (_, add):
        yield add


def test_the_first_conversations_are_due_and_then_enough_new_ones(growing):
    archive = growing(CHATS[:6])
    assert is_update_due(archive, PLAN)
    update_datastore(archive, PLAN)
    assert not is_update_due(archive, PLAN)
    growing(CHATS[6:7])
    assert not is_update_due(archive, PLAN)  # some tens of pairs are not worth the time


@pytest.mark.slow
def test_it_goes_on_where_it_was(growing):
    """The candidate subsets still hold all early pairs, and no pair twice."""
    archive = growing(CHATS[:9])
    first = update_datastore(archive, PLAN)
    growing(CHATS[9:])
    second = update_datastore(archive, PLAN)
    assert first.n_full < second.n_full == archive.n_pairs
    assert 0.6 * PLAN.size < second.n_pairs <= PLAN.size
    assert np.isfinite(second.perplexity)


@pytest.mark.slow
def test_a_state_of_conversations_that_are_forgotten_is_not_used(growing):
    archive = growing(CHATS)
    update_datastore(archive, PLAN)
    assert not is_update_due(archive, PLAN)
    archive.forget(archive.ids()[:1])
    assert is_update_due(archive, PLAN)
    assert update_datastore(archive, PLAN).n_full == archive.n_pairs


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no archive", None])
def test_a_state_that_is_damaged_is_made_anew(growing, tmp_path, damage):
    archive = growing(CHATS[:6])
    update_datastore(archive, PLAN)
    path = tmp_path / ONLINE
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    assert is_update_due(archive, PLAN)
    assert update_datastore(archive, PLAN).n_pairs > 0
