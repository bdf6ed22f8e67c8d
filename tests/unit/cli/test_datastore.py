"""``llmaas datastore``: it shows kept chats and deletes forgotten ones."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
from archived import BINDING, assert_holds, fill, record, record_id, select
from commands import error_of
from damages import files, overwrite

from llmaas_plugins.chats.exports import Message, load_conversations
from llmaas_plugins.cli.files import TUNE_PREFIX
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.output import counted
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build.inbox import remember, waiting_files
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.summary import read_summary

MAIL, NOTE, LONG = record(1), record(2, app="notes"), record(3, n_tokens=200)
RECORDS = [MAIL, NOTE, LONG]


def hex_id(one):
    return record_id(one).hex()


@pytest.fixture
def store(tmp_path):
    store = tmp_path / "store"
    fill(store, RECORDS)
    select(store, (MAIL, [0, 2]), (LONG, [198, 10, 11]))
    return store


@pytest.fixture
def run(capsys, store):
    """Return a function that runs an action and returns its exit code and report or error."""

    def run(action, *args, store=store, form="--json"):
        forms = [form] if form else []
        code = main(["datastore", action, *forms, "--store", str(store), *map(str, args)])
        captured = capsys.readouterr()
        if code == 2:
            return code, error_of(captured)
        return code, json.loads(captured.out) if form else captured.out

    return run


def damage_segment(store):
    overwrite(store / "000000.0.segment", 0, b"?")


def damage_selected(store):
    overwrite(store / "datastore.knn", 20, b"\xff\xff")


# -- stats --------------------------------------------------------------------------------------


def test_stats(run, store):
    before = files(store)
    code, found = run("stats")
    assert code == 0
    selected = found.pop("selected")
    assert found == {
        "store": str(store),
        "holder": None,
        "model": BINDING.fingerprint.hex(),
        "key_kind": "ffn_input",
        "n_embd": 24,
        "conversations": 3,
        "apps": {"mail": 2, "notes": 1},
        "without_app": 0,
        "sources": ["export.json"],
        "oldest": "2023-11-14T22:13:21+00:00",
        "newest": "2023-11-14T22:13:23+00:00",
        "tokens": 9 + 9 + 200,
        "pairs": 8 + 8 + 199,
        "disk_bytes": (store / "000000.0.segment").stat().st_size,
    }
    assert selected == {
        "model": BINDING.fingerprint.hex(),
        "conversations": 2,
        "pairs": 5,
        "disk_bytes": (store / "datastore.knn").stat().st_size,
        "settings": {"k": 100},
    }
    assert files(store) == before


def test_stats_for_people(run, store):
    text = run("stats", form=None)[1]
    assert "  conversations   3\n    by app        mail: 2, notes: 1\n" in text
    assert "  model           666666666666, keys ffn_input of 24\n" in text
    assert "  selected        5 pairs of 2 conversations, " in text
    (store / "datastore.knn").unlink()
    assert "nothing yet; run `llmaas datastore select`" in run("stats", form=None)[1]


def test_stats_tell_of_a_damaged_selection(run, store):
    damage_selected(store)
    code, found = run("stats")
    assert code == 0
    assert "Make it again with `llmaas datastore select`" in found["selected"]["error"]
    assert found["pairs"] == 215


def test_stats_while_it_is_in_use(run, store):
    with Archive.open(store, BINDING, writable=True):
        assert run("stats")[1]["holder"] == "this process already"


def test_there_must_be_a_datastore(run, tmp_path):
    for action in (["stats"], ["inspect"], ["forget", "--all"], ["forget", "ab"]):
        code, message = run(*action, store=tmp_path / "nothing")
        assert code == 2
        assert "there is no datastore in" in message
    assert not (tmp_path / "nothing").exists()


# -- inspect ------------------------------------------------------------------------------------


def test_inspect_lists_conversations(run):
    rows = run("inspect")[1]["conversations"]
    assert [row["id"] for row in rows] == list(map(hex_id, RECORDS))
    assert [row["selected"] for row in rows] == [2, 0, 3]
    assert rows[1] == {
        "id": hex_id(NOTE),
        "title": "title 2",
        "app": "notes",
        "source": "export.json",
        "added": "2023-11-14T22:13:22+00:00",
        "messages": 2,
        "tokens": 9,
        "pairs": 8,
        "selected": 0,
        "disk_bytes": 8192,
    }


def test_inspect_prints_a_table(run):
    lines = run("inspect", form=None)[1].splitlines()
    assert lines[0].split() == ["id", "added", "app", "source", "pairs", "selected", "title"]
    assert lines[3].split() == [
        hex_id(LONG)[:12], "2023-11-14", "mail", "export.json", "199", "3", "title", "3",
    ]  # fmt: skip


@pytest.mark.parametrize("n_digits", [6, 32])
def test_inspect_shows_a_conversation(run, n_digits):
    found = run("inspect", hex_id(LONG)[:n_digits].upper())[1]
    assert found["id"] == hex_id(LONG)
    assert found["contents"] == [
        {"role": "user", "content": "question 3: wo ist mein Schlüssel?"},
        {"role": "assistant", "content": "answer 3: 钥匙在桌上"},
    ]
    assert found["selected_tokens"] == [
        {"position": at, "token": int(LONG.tokens[at]), "before": None, "text": None}
        for at in (11, 12, 199)
    ]
    text = run("inspect", hex_id(LONG)[:n_digits], form=None)[1]
    assert "user:\n  question 3: wo ist mein Schlüssel?\n" in text
    assert text.endswith(
        "selected: 3 tokens\n  at 11, 12, 199\n  (use --model to show them as text)\n"
    )


def test_terminal_is_not_obeyed_by_texts(run, store):
    one = record(9)
    evil = replace(
        one.conversation,
        title="\x1b]0;owned\x07",
        app="a\nb",
        messages=(Message("user", "\x1b[2J\n\tx"),),
    )
    one = replace(one, conversation=evil, source="\x1b[31m")
    fill(store, [one])
    for action in (["stats"], ["inspect"], ["inspect", hex_id(one)]):
        text = run(*action, form=None)[1]
        assert "\x1b" not in text
        assert "\x07" not in text


@pytest.mark.parametrize("text", ["zz", "", "title 1"])
def test_unknown_id_is_refused(run, store, text):
    before = files(store)
    for action, then in (("inspect", ""), ("forget", "; nothing was changed")):
        code, message = run(action, text)
        assert code == 2
        assert f"no conversation {text!r}{then}. `llmaas datastore inspect` lists" in message
    code, message = run("forget", hex_id(MAIL), "zz")
    assert code == 2
    assert files(store)["000000.0.segment"] == before["000000.0.segment"]
    assert files(store)["datastore.knn"] == before["datastore.knn"]


def test_ambiguous_id_is_refused(run, store):
    fill(store, [record(seed) for seed in range(20, 40)])
    starts = [row["id"][0] for row in run("inspect")[1]["conversations"]]
    common = max(starts, key=starts.count)
    code, message = run("forget", common)
    assert code == 2
    assert f"{starts.count(common)} conversations have ids that begin with '{common}'" in message


# -- forget -------------------------------------------------------------------------------------


def test_one_is_not_many():
    assert [counted(n, "pair") for n in (0, 1, 2, 1000)] == [
        "0 pairs", "1 pair", "2 pairs", "1,000 pairs"
    ]  # fmt: skip


def is_anywhere(store, one):
    content = b"".join(
        [*files(store).values(), *(path.read_bytes() for path in waiting_files(store))]
    )
    texts = [message.content.encode() for message in one.conversation.messages]
    id_, keys = record_id(one), [key.tobytes() for key in one.pairs.keys]
    return any(trace in content for trace in [*texts, *keys, id_, id_.hex().encode()])


def assert_selected(store, expected):
    selected = read_summary(store)
    assert {id_: selected.positions_in(id_).tolist() for id_ in selected.positions} == expected
    datastore = Datastore.open(store / "datastore.knn", BINDING.fingerprint)
    assert len(datastore) == sum(map(len, expected.values()))
    datastore.close()


@pytest.mark.parametrize("digits", [8, 32])
def test_forgotten_conversation_is_gone_from_every_file(run, store, digits):
    before = sum(map(len, files(store).values()))
    code, found = run("forget", hex_id(LONG)[:digits])
    assert code == 0
    freed = before - sum(map(len, files(store).values()))
    assert found == {
        "n_conversations": 1, "n_pairs": 199, "n_selected": 3, "freed_bytes": freed, "unread": [],
    }  # fmt: skip
    assert freed > 199 * 48
    assert not is_anywhere(store, LONG)
    assert is_anywhere(store, MAIL)
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [MAIL, NOTE])
    assert_selected(store, {hex_id(MAIL): [1, 3]})
    code, message = run("forget", hex_id(LONG))
    assert code == 2
    assert "no conversation" in message


def test_what_waits_to_be_learned_is_forgotten_too(run, store):
    """This includes a chat that waits in one file with another, which stays."""
    for one, app in ((LONG, "mail"), (NOTE, "notes"), (MAIL, "mail")):
        talk = one.conversation
        remember(store, talk.messages, title=talk.title, app=app)
    first, *others = waiting_files(store)
    first.write_bytes(b"".join(path.read_bytes() for path in (first, others[0])))
    code, found = run("forget", hex_id(LONG))
    assert (code, found["n_conversations"]) == (0, 2)
    assert not is_anywhere(store, LONG)
    assert sum(len(load_conversations(path)) for path in waiting_files(store)) == 3
    run("forget", "--app", "mail")
    assert not is_anywhere(store, MAIL)
    left = [one for path in waiting_files(store) for one in load_conversations(path)]
    assert left == [NOTE.conversation] * 2
    remember(store, MAIL.conversation.messages, app="mail")
    assert run("forget", "--app", "mail")[1]["n_conversations"] == 1
    assert not is_anywhere(store, MAIL)


def test_app_can_be_forgotten(run, store):
    copy = store.with_name(f"{TUNE_PREFIX}abcd_123")  # left by a `llmaas tune` that was killed
    (copy / "knn").mkdir(parents=True)
    code, found = run("forget", "--app", "mail")
    assert (code, found["n_conversations"], found["n_selected"]) == (0, 2, 5)
    assert not copy.exists()
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [NOTE])
    assert_selected(store, {})
    code, message = run("forget", "--app", "mail")
    assert code == 2
    assert "no conversation of app 'mail'; nothing was changed. Known apps: notes." in message


def test_everything_can_be_forgotten(run, store):
    n_bytes = sum(map(len, files(store).values()))
    code, found = run("forget", "--all")
    assert code == 0
    assert found == {
        "n_conversations": 3, "n_pairs": 215, "n_selected": 5, "freed_bytes": n_bytes,
        "unread": [],
    }  # fmt: skip
    assert files(store) == {"lock": b""}
    assert run("inspect")[1] == {"conversations": []}
    assert "No conversations." in run("inspect", form=None)[1]
    assert run("stats")[1]["selected"] is None
    assert re.search(r"^  model +-$", run("stats", form=None)[1], re.MULTILINE)


def test_damaged_datastore_can_be_forgotten_as_a_whole(run, store):
    damage_segment(store)
    damage_selected(store)
    (store / "datastore.knn.dropped").write_bytes(b"left by a crash")
    (store / "notes.txt").write_text("mine")
    assert run("inspect")[0] == 2
    assert run("forget", hex_id(MAIL))[0] == 2
    code, found = run("forget", "--all")
    assert (code, found["n_conversations"], found["n_selected"]) == (0, 0, 0)
    assert files(store) == {"lock": b"", "notes.txt": b"mine"}


def test_what_a_crash_left_of_the_selection_goes_with_the_next_forget(run, store):
    left = LONG.pairs.keys.tobytes()
    for name in ("datastore.knn.dropped", "datastore.knn.partial"):
        (store / name).write_bytes(left)
    fd = os.open(store / "datastore.knn.dropped", os.O_RDONLY)
    run("forget", hex_id(NOTE))  # nothing of this chat is selected
    assert set(os.pread(fd, len(left), 0)) == {0}
    os.close(fd)
    assert {path.name for path in store.iterdir()} == {
        "lock", "000000.1.segment", "datastore.knn", "forgotten",
    }  # fmt: skip


def test_selected_pairs_of_a_conversation_that_is_not_in_the_archive_can_be_forgotten(run, store):
    with Archive.open(store, writable=True) as archive:
        archive.forget([record_id(LONG)])
    code, found = run("forget", hex_id(LONG))
    assert (code, found["n_conversations"], found["n_selected"]) == (0, 0, 3)
    assert not is_anywhere(store, LONG)


def test_selection_without_an_archive_is_shown_and_forgotten(run, store):
    """Some devices have only the searched datastore."""
    for name in ("lock", "000000.0.segment"):
        (store / name).unlink()
    found = run("stats")[1]
    assert (found["conversations"], found["model"], found["selected"]["pairs"]) == (0, None, 5)
    assert run("forget", hex_id(MAIL)[:8])[1]["n_selected"] == 2
    assert_selected(store, {hex_id(LONG): [11, 12, 199]})
    assert run("forget", "--all")[1]["n_selected"] == 3
    assert files(store) == {"lock": b""}


@pytest.mark.slow
def test_nothing_is_forgotten_while_another_writes(run, store):
    with Archive.open(store, BINDING, writable=True):
        for what in (["--all"], [hex_id(MAIL)], ["--app", "mail"]):
            code, message = run("forget", *what)
            assert code == 2
            assert "is in use by this process already. Stop it, or set" in message
    with Archive.open(store) as archive:
        assert_holds(archive, RECORDS)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["ab", "--all"],
        ["ab", "--app", "x"],
        ["--app", "x", "--all"],
        ["--app", "x", "--no-app"],
    ],
)
def test_forget_wants_ids_or_an_app_or_all(run, args):
    with pytest.raises(SystemExit) as caught:
        run("forget", *args)
    assert caught.value.code == 2


def test_store_is_where_the_configuration_says(capsys, store, tmp_path):
    config = tmp_path / "llmaas.toml"
    config.write_text(f'[plugins.knn_lm]\nstore = "{store}"\n')
    assert main(["datastore", "inspect", "--json", "--config", str(config)]) == 0
    assert len(json.loads(capsys.readouterr().out)["conversations"]) == 3
