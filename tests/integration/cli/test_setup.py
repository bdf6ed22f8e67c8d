"""``llmaas setup`` on small models, and an unchanged app with what it made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from families import write_family
from forked_commands import fork_children
from served import wait_until

from llmaas_eval.data import packaged_chats
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup import extents, processes, steps
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.model.digest import file_digest

pytestmark = pytest.mark.slow


QUICK = "--skip", "profile", "learn", "recover", "words"
SKIPPED = "--skip", "learn", "words"  # tests/train learns them
APP = """
import json
from llama_cpp import Llama
from llmaas_plugins.activation import active_suite

llama = Llama("model.gguf", n_ctx=512, verbose=False)
llama("User: Hello there, how are you today?\\nAssistant:", max_tokens=4)
print(json.dumps(active_suite().status()["plugins"]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder to set up in, whose home has no files of others."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    monkeypatch.setattr(extents, "_TOKENS", (1, 1))  # adapters cannot be learned from so few
    monkeypatch.setattr(extents, "_MOST_WORK", 1e10)  # less is done, as for a large model
    monkeypatch.setattr(extents, "_FEW_LENGTHS", (32, 64))
    monkeypatch.setattr(extents, "_REQUESTS", (20, 96))
    fork_children(monkeypatch)
    for name in ("LLMAAS_CONFIG", "LLMAAS_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def short_text(monkeypatch):
    """Let levels be prepared with a short text. A process in the background would not know it."""
    prepare = steps._prepare
    monkeypatch.setattr(steps, "_prepare", lambda job: (*prepare(job), "--tokens", "512"))


def setup(capfd, *options):
    """Run the command; return its exit status, its report and what it said."""
    capfd.readouterr()
    status = main(["setup", "model.gguf", *options, "--json"])
    out, err = capfd.readouterr()
    return status, json.loads(out) if out else None, err


def run_app(folder):
    (folder / "app.py").write_text(APP)
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "run", "app.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("short_text")
def test_from_a_model_to_an_app_with_all_plugins(folder, capfd, monkeypatch):
    write_family("llama", folder / "model.gguf")
    options = "--chats", str(packaged_chats()[0]), "--memory", "60%", "--no-improve"
    status, report, said = setup(capfd, *options, "--dry-run")
    assert status == 0
    assert [*folder.iterdir()] == [folder / "model.gguf"]
    assert all(step["estimated_s"] > 0 and not step["is_done"] for step in report["steps"])
    assert "3. profile: measure how long each level takes with prompts of 32 and 64" in said

    status, report, said = setup(capfd, *options)
    assert status == 0
    assert report["doctor"]["ok"]
    assert [*report["seconds"]] == ["prepare", "pack", "profile", "learn", "datastore"]
    assert (folder / "llmaas.toml").exists()

    plugins = run_app(folder)
    made = folder / "model.elastic.gguf"
    assert plugins["models"] == {"loaded": {"model.gguf": str(made)}}
    assert plugins["elastic"]["models"]
    assert {*plugins} == {
        "kv_chunks", "elastic", "deadlines", "flash_weights", "knn_lm", "models", "memory",
    }  # fmt: skip

    status, report, said = setup(capfd, *options)  # nothing is done again
    assert (status, report["seconds"]) == (0, {})
    assert all(step["is_done"] for step in report["steps"])
    assert "all is made already: nothing is left to do" in said

    digest = file_digest(made)
    assert main(["setup", "model.gguf", *options[:-1], "--improve", *SKIPPED]) == 0
    assert file_digest(made) == digest  # datastore and packed weights still fit
    assert {*read_elastic(made).tables} == {"uniform", "searched"}
    assert 'table = "searched"' in (folder / "llmaas.toml").read_text()
    status, report, _ = setup(capfd, *options, *SKIPPED)
    assert (status, report["seconds"]) == (0, {})
    assert 'table = "searched"' in (folder / "llmaas.toml").read_text()
    assert run_app(folder)["models"] == {"loaded": {"model.gguf": str(made)}}
    monkeypatch.setenv("LLMAAS_PLUGINS", "")
    assert run_app(folder) == {}  # with nothing on, the app gets its own file
    monkeypatch.delenv("LLMAAS_PLUGINS")

    (folder / "model.elastic.packed").unlink()  # what was removed is made again
    options = *QUICK, "--no-improve"
    assert [*setup(capfd, *options)[1]["seconds"]] == ["pack"]
    assert 'table = "searched"' in (folder / "llmaas.toml").read_text()
    made.unlink()
    status, report, _ = setup(capfd, *options)
    assert status == 0
    assert "prepare" in report["seconds"]
    assert 'table = "uniform"' in (folder / "llmaas.toml").read_text()  # until it is improved


def architecture(folder):
    """Return the architecture of the model that an app gets."""
    app = (
        "from llama_cpp import Llama\n"
        "llama = Llama('model.gguf', n_ctx=64, verbose=False)\n"
        "print(llama.metadata['general.architecture'])"
    )
    (folder / "arch.py").write_text(app)
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "run", "arch.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


@pytest.mark.usefixtures("short_text")
def test_another_model_at_the_same_path_is_set_up_anew(folder, capfd):
    """An update, and back: the prepared file is always that of the model that is there."""
    for family in ("llama", "qwen3", "llama"):
        write_family(family, folder / "model.gguf")
        status, report, _ = setup(capfd, *QUICK, "--no-improve")
        assert status == 0
        assert {"prepare", "pack"} <= {*report["seconds"]}
        assert architecture(folder) == family
    assert (folder / "llmaas.toml").read_text().count("[models.") == 1


@pytest.mark.usefixtures("short_text")
def test_settings_of_the_user_do_not_change_what_is_made(folder, capfd, monkeypatch):
    write_family("llama", folder / "model.gguf")
    home = folder.parent / "home" / ".config" / "llmaas"
    home.mkdir(parents=True)
    (home / "llmaas.toml").write_text('[plugins.knn_lm]\nstore = "/nonexistent/x"\n')
    chats = "--chats", str(packaged_chats()[0])
    status, report, _ = setup(capfd, *QUICK, *chats, "--no-improve")
    assert (status, report["doctor"]["ok"]) == (0, True)
    monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS", "")  # not a key
    status, report, _ = setup(capfd, *QUICK, *chats, "--no-improve")
    assert (status, report["seconds"], report["doctor"]["ok"]) == (1, {}, False)
    assert "[models." in (folder / "llmaas.toml").read_text()


def test_a_model_that_cannot_be_prepared_gets_the_rest(folder, capfd):
    write_family("gpt-oss", folder / "model.gguf")
    _, report, said = setup(capfd, "--chats", str(packaged_chats()[0]), "--dry-run")
    assert report["steps"][0]["estimated_s"] > 0
    assert "datastore: select what the chats can tell the model, no estimate" in said
    assert "about 1 s without datastore, and up to" in said
    status, report, said = setup(capfd)  # nothing goes on in the background
    assert status == 0
    assert "elastic and deadlines are left out:" in said
    assert [*report["seconds"]] == ["pack"]
    assert "models." not in (folder / "llmaas.toml").read_text()
    assert {*run_app(folder)} == {"kv_chunks", "flash_weights"}


def test_a_prepared_file_of_the_user_is_kept_and_used(folder, capfd):
    model = write_family("llama", folder / "model.gguf")
    made = folder / "model.elastic.gguf"
    assert main(["elastic", "prepare", str(model), "--no-search"]) == 0
    content = made.read_bytes()
    status, _, said = setup(capfd)
    assert status == 2
    assert f"`llmaas setup {made}` uses it" in said
    assert made.read_bytes() == content
    assert main(["setup", str(made), "--skip", "learn", "pack", "profile"]) == 0
    text = (folder / "llmaas.toml").read_text()
    assert 'table = "uniform"' in text
    assert "[models" not in text
    assert made.read_bytes() == content


def test_better_widths_follow_in_the_background(folder, capfd):
    """The process has the lowest priority, so the test stops it instead of waiting for its end."""
    write_family("llama", folder / "model.gguf")
    status, report, _ = setup(capfd, *QUICK)
    assert status == 0
    process = report["improving"]["pid"]
    try:
        status, again, _ = setup(capfd, *QUICK)
        assert (status, again["improving"]) == (0, report["improving"])
        wait_until(Path(report["improving"]["log"]).read_text)  # on a busy machine it begins late
    finally:
        os.kill(process, signal.SIGTERM)
        (status,) = [one.wait() for one in processes._running if one.pid == process]
    assert status == 128 + signal.SIGTERM
    assert "stopped; the same command goes on" in Path(report["improving"]["log"]).read_text()
    assert 'table = "uniform"' in (folder / "llmaas.toml").read_text()
    assert setup(capfd, *QUICK, "--no-improve")[0] == 0


def test_better_widths_need_a_model_that_is_set_up(folder, reference_model, capsys):
    shutil.copy(reference_model, folder / "model.gguf")
    assert main(["setup", "model.gguf", "--improve"]) == 2
    assert "is not set up: run `llmaas setup" in capsys.readouterr().err
