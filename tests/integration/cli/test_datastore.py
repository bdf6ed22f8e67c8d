"""``llmaas datastore`` on a model, from exports to a searched datastore, with interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import fork_server
import pytest

from llmaas_plugins.cli.main import main
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.service.context_log import ContextLog, ContextRecord

SECONDS = 60


def chat(number, n_turns=3):
    messages = []
    for turn in range(n_turns):
        messages += [
            {"role": "user", "content": f"Tell me about animal {number}.{turn}."},
            {"role": "assistant", "content": f"It has {number} legs and {turn} eyes."},
        ]
    return {"title": f"animal {number}", "app": "zoo", "messages": messages}


@pytest.fixture
def export(tmp_path):
    def write(numbers, name="export.jsonl", **kwargs):
        rows = [json.dumps(chat(number, **kwargs)) for number in numbers]
        path = tmp_path / name
        path.write_text("\n".join(rows))
        return path

    return write


@pytest.fixture
def command(tmp_path, reference_model):
    """Return a function that builds an action's arguments; actions that add get the model."""

    def command(action, *args):
        model = ["--model", reference_model, "--threads", "1", "--n-ctx", "256"]
        options = model if action in ("build", "add") else []
        store = ["--store", tmp_path / "store"]
        return [str(arg) for arg in ("datastore", action, *store, *options, *args)]

    return command


@pytest.fixture
def run(command, capsys):
    """Return a function that runs an action and returns its exit code and report or error."""

    def run(action, *args):
        code = main([*command(action, *args), "--json"])
        captured = capsys.readouterr()
        return code, captured.err if code == 2 else json.loads(captured.out)

    return run


def test_build_makes_a_datastore_that_is_searched(
    run, export, reference_model, make_llama, tmp_path
):
    code, built = run("build", export(range(6)), "--size", 100)
    assert code == 0
    assert (built["n_added"], built["n_known"], built["n_left_out"]) == (6, 0, 0)
    selected = built["selected"]
    assert (selected["n_pairs"], selected["n_full"]) == (100, built["n_pairs"])
    assert selected["perplexity"] < selected["perplexity_alone"]  # the chats are alike
    rows = run("inspect")[1]["conversations"]
    assert [row["title"] for row in rows] == [f"animal {i}" for i in range(6)]
    assert {(row["app"], row["source"], row["messages"]) for row in rows} == {
        ("zoo", "export.jsonl", 6)
    }
    assert sum(row["pairs"] for row in rows) == built["n_pairs"]
    assert sum(row["selected"] for row in rows) == 100
    shown = run("inspect", rows[2]["id"][:10], "--model", reference_model)[1]
    assert shown["contents"] == chat(2)["messages"]
    assert len(shown["selected_tokens"]) == rows[2]["selected"] > 0
    with Archive.open(tmp_path / "store") as archive:
        tokens = archive.tokens(bytes.fromhex(rows[2]["id"]))
    text = make_llama().detokenize(tokens.tolist(), special=True).decode()
    assert all(token["before"] + token["text"] in text for token in shown["selected_tokens"])


@pytest.mark.slow
def test_building_again_adds_what_is_new(run, export):
    run("build", export(range(2)))
    code, built = run("build", export(range(4)))
    assert (code, built["n_added"], built["n_known"]) == (0, 2, 2)
    code, added = run("add", export(range(3, 6), "more.jsonl"), export([0], "old.jsonl"))
    assert (code, added["n_added"], added["n_known"]) == (0, 2, 2)
    found = run("stats")[1]
    assert (found["conversations"], found["sources"]) == (6, ["export.jsonl", "more.jsonl"])
    assert found["selected"]["pairs"] == built["selected"]["n_pairs"] < found["pairs"]
    code, selected = run("select", "--size", 50)
    assert (code, selected["n_pairs"], selected["n_full"]) == (0, 50, found["pairs"])
    assert run("stats")[1]["selected"]["pairs"] == 50
    assert run("stats")[1]["selected"]["settings"]["how"] == "draw"
    code, hardest = run("select", "--size", 50, "--how", "top")
    assert (code, hardest["n_pairs"]) == (0, 50)
    assert run("stats")[1]["selected"]["settings"]["how"] == "top"


@pytest.mark.slow
def test_the_first_conversations_are_read_and_the_rest_later(run, export, command, capsys):
    n = sum(len(message["content"]) for message in chat(0)["messages"])
    assert main([*command("add", export(range(4))), "--characters", str(n + 1)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "2 conversations left for later.\n"
    assert printed.out.startswith("2 conversations added, ")
    code, added = run("add", export(range(4)), "--characters", 10 * n)
    assert (code, added["n_added"], added["n_known"]) == (0, 2, 2)


@pytest.mark.slow
def test_forgotten_chats_are_neither_stored_nor_selected(run, export, tmp_path):
    run("build", export(range(4)))
    gone = run("inspect")[1]["conversations"][1]
    code, found = run("forget", gone["id"])
    assert (code, found["n_pairs"], found["n_selected"]) == (0, gone["pairs"], gone["selected"])
    assert all(b"animal 1." not in path.read_bytes() for path in (tmp_path / "store").iterdir())
    assert run("select")[1]["n_full"] == run("stats")[1]["pairs"]
    rebuilt = run("build", export(range(5)))[1]
    assert (rebuilt["n_added"], rebuilt["n_known"], rebuilt["n_forgotten"]) == (1, 3, 1)
    taken = run("build", "--again", export(range(5)))[1]
    assert (taken["n_added"], taken["n_known"], taken["n_forgotten"]) == (1, 4, 0)
    assert run("add", export(range(5)))[1]["n_known"] == 5


def test_a_datastore_keeps_its_kind_of_keys(run, export, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS__KNN_LM__KEY", "final_norm")
    run("build", export(range(2)))
    monkeypatch.setenv("LLMAAS_PLUGINS__KNN_LM__KEY", "ffn_input")
    assert run("add", export(range(3)))[0] == 0
    found = run("stats")[1]
    assert (found["key_kind"], found["conversations"]) == ("final_norm", 3)


def test_another_model_needs_another_datastore(run, export, reference_model, tmp_path):
    run("build", export(range(2)))
    content = bytearray(reference_model.read_bytes())
    content[-100] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    code, message = run("add", export(range(3)), "--model", tmp_path / "other.gguf")
    assert code == 2
    assert "Set plugins.knn_lm.store to another directory for this model, or `llmaas" in message
    assert run("stats")[1]["conversations"] == 2


def test_what_cannot_be_read_is_refused_before_anything_is_made(run, export, tmp_path):
    (tmp_path / "bad.json").write_text('{"nothing": 1}')
    for args in (["missing.json"], [export([1]), tmp_path / "bad.json"]):
        code, message = run("build", *args)
        assert code == 2
        assert message.startswith("llmaas: error: ")
    code, message = run("add", export([1]), "--lora", tmp_path / "missing.gguf")
    assert code == 2
    assert "found no file " in message
    code, message = run("select")
    assert code == 2
    assert "there is no datastore in" in message
    assert not (tmp_path / "store").exists()


def test_empty_datastore_has_nothing_to_select_from(run, export, tmp_path):
    run("add", export([1]))
    run("forget", "--all")
    code, message = run("select")
    assert code == 2
    assert "is empty: nothing to select from. Add conversations" in message


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_adding_that_is_stopped_goes_on(run, command, export, tmp_path, how):
    path = export(range(20), n_turns=8)
    process = fork_server.Process(
        [sys.executable, "-m", "llmaas_plugins.cli.main", *command("add", path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while not list((tmp_path / "store").glob("*.segment")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    _, errors = process.communicate(timeout=SECONDS)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "llmaas: stopped; what was added is kept; repeat the command" in errors
    with Archive.open(tmp_path / "store") as archive:
        n_before = len(archive)
    assert 0 <= n_before < 20
    code, added = run("add", path)
    assert (code, added["n_known"], added["n_added"]) == (0, n_before, 20 - n_before)
    assert run("stats")[1]["conversations"] == 20


def test_list_may_be_cut_short_by_its_reader(run, command, export):
    run("add", export(range(3)))
    listing = [sys.executable, "-m", "llmaas_plugins.cli.main", *command("inspect")]
    with fork_server.Process(listing, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_service_s_own_log_is_a_source(run, tmp_path):
    """The log is used only on request, because the model itself wrote half of it."""
    log = ContextLog(tmp_path / "service")
    talk = [
        {"role": "user", "content": "Where are you?"},
        {"role": "assistant", "content": "Here."},
    ]
    log.add(ContextRecord("a1", "mail", talk), 9)
    log.add(ContextRecord("b2", "mail", []), 9)
    log.close()
    code, added = run("add", "--service-log", tmp_path / "service")
    assert (code, added["n_added"], added["n_left_out"]) == (0, 1, 0)
    (row,) = run("inspect")[1]["conversations"]
    assert (row["title"], row["app"], row["source"]) == ("a1", "mail", "service")


def test_something_must_be_named_to_be_added(run, tmp_path):
    assert "nothing to add" in run("add")[1]
    code, error = run("add", "--service-log", tmp_path)
    assert (code, "no contexts of a service" in error) == (2, True)
