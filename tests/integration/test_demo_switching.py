"""``llmaas demo switching`` end to end, in its shortest form."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from commands import mistake
from outputs import made

COMMAND = [sys.executable, "-m", "llmaas_plugins.cli.main", "demo", "switching"]
SYSTEMS = ["recompute", "state files", "LlamaDiskCache", "llmaas"]


@pytest.fixture
def demo(tmp_path):
    environ = dict(os.environ)

    def demo(*args):
        return fork_server.run(
            [*COMMAND, "--tokens", "4", *args],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return demo


def numbers(value):
    """Yield every number inside a value, and None where a number is missing."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [] if isinstance(value, str) else [value]


@pytest.mark.slow
def test_the_packaged_conversations(demo, tmp_path):
    plot = importlib.util.find_spec("matplotlib") is not None
    options = ["--calls", "10", "--contexts", "3", "--json", "all.json"]
    done = demo(*options, *(["--plot", "all.png"] if plot else []))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["n_calls"], found["n_contexts"]) == (10, 3)
    assert list(found["systems"]) == list(found["calls"]) == SYSTEMS
    assert {len(calls) for calls in found["calls"].values()} == {10}
    for kind in ("systems", "speedup"):
        assert all(math.isfinite(number) for number in numbers(found[kind]))
    assert len({summary["n_switches"] for summary in found["systems"].values()}) == 1
    assert (
        " demo switching --tokens 4 --calls 10 --contexts 3 --json all.json"
        in found["run"]["command"]
    )
    assert [row[0].strip("*") for row in made("demo", found)] == SYSTEMS
    assert [row[0] for row in made("demo-ratios", found)] == list(found["speedup"])
    for name, calls in found["calls"].items():
        assert found["systems"][name]["n_switches"] == sum(c["enter_s"] is not None for c in calls)
        assert all(c["first_token_s"] > 0 and c["leave_s"] >= 0 for c in calls)
    assert found["systems"]["llmaas"]["n_switches"] > 3
    assert set(found["speedup"]) == set(SYSTEMS) - {"llmaas"}
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert [row for row in rows if row in SYSTEMS] == SYSTEMS
    assert all(f"as fast as {name} " in done.stdout for name in SYSTEMS[:-1])
    if plot:
        assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_chats_of_the_users_own(demo, tmp_path):
    chats = [
        {"messages": [{"role": "system", "content": "You sell shoes."}, *turns("red", "blue")]},
        {"messages": turns("dogs", "cats", "mice")},
        {"messages": [{"role": "system", "content": "Nobody asked me."}]},
    ]
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    done = demo("--data", "chats.jsonl", "--codec", "lossless", "--threads", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # the table goes to stderr
    assert (found["n_calls"], found["n_contexts"]) == (5, 2)
    said = {name: [call["text"] for call in calls] for name, calls in found["calls"].items()}
    assert said["llmaas"] == said["state files"]  # both restore every cell to the last bit
    assert len(set(said["llmaas"])) > 1
    assert "Do you like mice?" in done.stderr
    assert "You sell shoes." not in done.stderr


def turns(*subjects):
    questions = [{"role": "user", "content": f"Do you like {subject}?"} for subject in subjects]
    answer = {"role": "assistant", "content": "This is not used."}
    return [message for question in questions for message in (question, answer)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calls", "1"], "no context was switched"),
        (["--data", "one.jsonl"], "found 1 conversations with user turns, need 2"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--model", "none.gguf"], "none.gguf"),
        (["--contexts", "x"], "argument --contexts: expected an integer from 2 on, found 'x'"),
        (["--tokens", "-1"], "argument --tokens: expected an integer from 1 on, found '-1'"),
        (["--budget-share", "nan"], "expected a number above 0, up to 1e+09, found 'nan'"),
        (["--json", "none/x"], "found no folder none to write x to"),
        (["--plot", "."], ". is a folder or a device, expected a file's name"),
        (["--n-ctx", "8"], "--n-ctx"),
    ],
)
def test_mistakes_are_one_line_and_code_2(tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": turns("dogs")}))
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, ["demo", "switching", "--tokens", "4", *options])


# multiprocessing's own children, and those of systems
@pytest.mark.parametrize("n_children", [1, 2, 5])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_it_is_one_line_and_leaves_nothing(tmp_path, n_children, number, status):
    with fork_server.Process(
        COMMAND,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while len(found := children.read_text().split()) < n_children:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (status, b"", b"llmaas: stopped\n")
    assert not list(Path("/var/tmp").glob(f"llmaas-demo-{process.pid}-*"))
    systems = [Path(f"/proc/{pid}/cmdline") for pid in found]
    assert not [path for path in systems if path.exists() and b"spawn_main" in path.read_bytes()]
