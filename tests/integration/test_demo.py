"""``llmaas demo`` end to end, in its shortest form."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree as ET

import fork_server
import pytest
from commands import mistake
from forked_commands import fork_children
from outputs import made

from llmaas_plugins.cli.given_text import conversation_files
from llmaas_plugins.cli.main import main
from llmaas_plugins.reference_model import reference_model_path

COMMAND = [sys.executable, "-m", "llmaas_plugins.cli.main", "demo"]
SYSTEMS = [
    "vanilla",
    "vanilla + state files",
    "kv_chunks alone",
    "flash_weights alone",
    "elastic + deadlines",
    "knn_lm alone",
    "all together",
]


@pytest.fixture
def environ(tmp_path):
    """Return an environment with an empty home, in a folder of its own."""
    home = tmp_path / "home"
    home.mkdir()
    return os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}


@pytest.fixture
def work(tmp_path):
    """Return a folder to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def demo(work, environ, monkeypatch, capfd):
    """Return a function that runs the command here; it returns its output and its messages."""
    fork_children(monkeypatch)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.chdir(work)

    def run(*options):
        capfd.readouterr()
        assert main(["demo", *options]) == 0
        return capfd.readouterr()

    return run


@pytest.fixture
def talks(tmp_path):
    """Return an export with the packaged conversations of two apps."""
    path = tmp_path / "talks.jsonl"
    with path.open("w") as file:
        for packaged in conversation_files():
            if packaged.stem in {"chat", "ui_agent"}:
                file.write(packaged.read_text().splitlines()[-1] + "\n")
    return path


@pytest.mark.slow
def test_a_day_of_the_packaged_model(work, environ, demo, talks):
    """The next test has the packaged day's six contexts, with fewer systems."""
    options = ["--calls", "4", "--tokens", "6", "--json", "day.json", "--plot", "day.svg"]
    printed, _ = demo(*options, "--data", str(talks), "--threads", "1")
    assert sorted(path.name for path in work.iterdir()) == ["day.json", "day.svg"]
    assert list(Path(environ["HOME"]).iterdir()) == []
    found = json.loads((work / "day.json").read_text())
    assert (found["n_calls"], len(found["calls"]), found["left_out"]) == (4, 4, {})
    systems = found["systems"]
    assert list(systems) == SYSTEMS
    assert [row[0].strip("*") for row in made("demo-day", found)] == SYSTEMS
    memory = found["memory"]
    whole = memory["model_bytes"] + memory["contexts_bytes"]
    assert memory["shared_bytes"] == int(0.6 * whole)
    assert memory["is_vanilla_limited"]
    for name, budget in memory["process_budget_bytes"].items():
        assert budget is None or systems[name]["peak_bytes"] <= budget
    assert memory["process_budget_bytes"]["all together"] > memory["shared_bytes"]
    assert systems["vanilla"]["agreement"]["value"] == systems["vanilla"]["speed"]["value"] == 1
    assert systems["vanilla + state files"]["agreement"]["value"] > 0.95
    n_made = {one["further_kept"]["n_made"] for one in systems.values()}
    assert len(n_made) == 1
    svg = ET.fromstring((work / "day.svg").read_text())
    said = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert set(SYSTEMS) < set(said)
    rows = [line.split("  ")[0] for line in printed.splitlines()]
    assert [row for row in rows if row in SYSTEMS] == 2 * SYSTEMS  # the table and the bars
    assert "All plugins together do the same work" in printed


@pytest.mark.slow
def test_a_model_that_nothing_was_made_for(light_model, work, demo):
    shutil.copyfile(light_model, work / "your.gguf")
    printed, _ = demo("--model", "your.gguf", "--calls", "4", "--tokens", "3", "--json", "-")
    found = json.loads(printed)  # the table goes to stderr
    assert list(found["systems"]) == [*SYSTEMS[:3], SYSTEMS[-1]]
    assert list(found["left_out"]) == ["elastic", "flash_weights", "knn_lm"]
    assert all("; `llmaas setup your.gguf" in reason for reason in found["left_out"].values())
    assert {len(one["systems"]) for one in found["calls"]} == {4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "moment", "number"),
    [
        ((), b"step 1 of 7", signal.SIGINT),
        ((), b"step 1 of 7", signal.SIGTERM),
        (("--model", "your.gguf"), b"step 2 of 3", signal.SIGTERM),
        (("--model", "your.gguf"), b"step 3 of 3", signal.SIGINT),
    ],
)
def test_stopping_it_is_one_line_and_leaves_nothing(work, environ, options, moment, number):
    shutil.copyfile(reference_model_path(), work / "your.gguf")
    with fork_server.Process(
        [*COMMAND, *options],
        cwd=work,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        watch = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        while moment not in (line := process.stderr.readline()):
            assert line
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        watch.cancel()
    assert (process.returncode, stdout) == (128 + number, b"")
    assert stderr.splitlines()[-1] == b"llmaas: stopped"
    assert b"Traceback" not in stderr
    assert not list(Path("/var/tmp").glob(f"llmaas-demo-{process.pid}-*"))
    assert [path.name for path in work.iterdir()] == ["your.gguf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data", "one.jsonl"],
            "found 1 conversations in which the user got a reply, expected 2",
        ),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--model", "none.gguf"], "found no file none.gguf; expected a model in GGUF"),
        (["--model", "one.jsonl"], "one.jsonl"),
        (["--calls", "0"], "argument --calls: expected an integer from 1 on, found '0'"),
        (["--memory", "nan"], "expected a number above 0, up to 1e+09, found 'nan'"),
        (["--json", "none/x"], "found no folder none to write x to"),
        (["--plot", "."], ". is a folder or a device, expected a file's name"),
        (["swiching"], "switching"),
    ],
)
def test_mistakes_are_one_line_and_code_2(tmp_path, monkeypatch, capsys, options, message):
    talk = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": talk}))
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, ["demo", *options])
