"""Steps of ``llmaas setup``: how the threads of their engines wait, and how they are announced."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
from families import write_family

from llmaas_hooks import StoreError
from llmaas_plugins.cli.elastic.estimates import store_s
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup import command, processes
from llmaas_plugins.cli.setup.estimates import Estimates
from llmaas_plugins.cli.setup.running import Run
from llmaas_plugins.cli.setup.steps import Job, improving_steps, run, steps_of
from llmaas_plugins.reference_model import reference_model_path

POLICY = "import json, os; print(json.dumps({'path': os.environ.get('OMP_WAIT_POLICY', 'unset')}))"


@pytest.fixture
def policies(monkeypatch):
    """Return the policy with which each step runs, by the step's name."""
    monkeypatch.setattr(processes, "_LLMAAS", (sys.executable, "-ISc", POLICY))

    def policies():
        job = Job(reference_model_path(), "d")
        return {step.name: run(step) for step in (*steps_of(job), *improving_steps(job))}

    return policies


def test_threads_that_wait_leave_the_processors_to_others(policies, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    found = policies()
    timed = {found.pop("profile"), found.pop("profile searched")}
    assert timed == {"unset"}  # as for apps
    assert set(found.values()) == {"passive"}


def test_a_policy_that_the_user_chose_stays(policies, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert set(policies().values()) == {"active"}


@pytest.mark.parametrize("is_done", [True, False])
def test_time_and_disk_are_announced_if_something_is_left(tmp_path, monkeypatch, capsys, is_done):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_family("llama", tmp_path / "model.gguf")
    monkeypatch.setattr(Run, "is_done", lambda *_: is_done)
    estimates = Estimates({"prepare": 50.0, "pack": 1.0, "profile": 30.0, "learn": 9.0}, 3 << 20)
    monkeypatch.setattr(command, "estimates_of", lambda _: estimates)
    assert main(["setup", "model.gguf", "--dry-run", "--json"]) == 0
    said = capsys.readouterr()
    steps = said.err.splitlines()[1:-1]
    assert [line.endswith(", done") for line in steps] == [is_done] * 4
    last = f"about 2 min together, and up to 3.0 MiB of disk in {tmp_path}"
    nothing = "all is made already: nothing is left to do"
    assert said.err.splitlines()[-1] == (nothing if is_done else last)
    report = json.loads(said.out)
    assert report["disk_bytes"] == 3 << 20
    assert [step["is_done"] for step in report["steps"]] == [is_done] * 4
    assert [step["estimated_s"] for step in report["steps"]] == [50, 1, 30, 9]


def test_a_disk_with_room_for_the_file_is_not_refused_for_the_probe(tmp_path, monkeypatch):
    free = 3 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    written = []
    monkeypatch.setattr(os, "fsync", lambda fd: written.append(os.fstat(fd).st_size))
    assert store_s(tmp_path / "model.gguf") > 0
    assert written == [free // 2]


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*model.gguf: No space left on device\. M"):
        store_s(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
