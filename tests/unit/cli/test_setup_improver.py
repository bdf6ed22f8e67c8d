"""The process that improves a model in the background is known by its lock, not by its number."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading

import pytest

from llmaas_plugins.cli.setup import improving
from llmaas_plugins.cli.setup.improver import found_improver, improver_lock, set_improver
from llmaas_plugins.cli.setup.running import Run
from llmaas_plugins.cli.setup.steps import Job
from llmaas_plugins.reference_model import reference_model_path

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def started():
    """Return a function that starts processes, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, lock=None):
            fds = () if lock is None else (lock,)
            command = [sys.executable, "-c", SLEEP, *arguments]
            process = stack.enter_context(subprocess.Popen(command, pass_fds=fds))
            stack.callback(process.kill)
            return process

        yield start


def test_a_process_has_the_lock_that_it_inherited_as_long_as_it_lives(tmp_path, started):
    assert found_improver(tmp_path) is None
    with improver_lock(tmp_path) as lock:
        process = started(lock=lock)
        set_improver(lock, process.pid)
    assert found_improver(tmp_path) == process.pid
    with improver_lock(tmp_path) as lock:
        assert lock is None
    process.kill()
    process.wait()
    assert found_improver(tmp_path) is None
    with improver_lock(tmp_path) as lock:
        assert lock is not None


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run of a model that is set up, but not improved."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Run, "is_improved", lambda _: False)
    job = Job(reference_model_path(), "d" * 64)
    job.folder.mkdir(parents=True)
    return Run(job, tmp_path / "llmaas.toml", None, print)


ARGS = argparse.Namespace(memory=None)


def test_a_process_that_has_the_lock_is_waited_for_until_it_says_its_number(run):
    (run.job.folder / "improve.pid").write_text("1")  # of a process that is gone
    with improver_lock(run.job.folder) as lock:
        timer = threading.Timer(0.05, set_improver, (lock, 4711))
        timer.start()
        found = improving.begin_improving(run, ARGS)
        timer.join()
    assert found["pid"] == 4711


def test_somebody_who_only_looks_who_has_the_lock_keeps_nothing_from_beginning(run, monkeypatch):
    monkeypatch.setattr(improving, "begun", lambda *_: 4711)
    with contextlib.ExitStack() as looking:
        looking.enter_context(improver_lock(run.job.folder))
        timer = threading.Timer(0.05, looking.close)
        timer.start()
        assert improving.begin_improving(run, ARGS)["pid"] == 4711
        timer.join()


def test_a_configuration_that_was_removed_or_is_of_another_model_stays_so(run, monkeypatch):
    monkeypatch.setattr(Run, "is_done", lambda *_: True)
    written = []
    monkeypatch.setattr(Run, "write", lambda _, table: written.append(table))
    for text in (None, "", "models = 1", '[models."other.gguf"]', "[models"):
        if text is not None:
            run.config.write_text(text)
        improving.improve(run)
    assert written == []
    run.config.write_text(f'[models."{run.job.model}"]')
    improving.improve(run)
    assert written == ["searched"]


def test_another_process_with_the_number_of_one_that_is_gone_keeps_nothing_from_beginning(
    run, monkeypatch, started
):
    other = started("setup", "other.gguf", "--improve")
    (run.job.folder / "improve.pid").write_text(str(other.pid))
    processes = []

    def begun(_arguments, _log, lock):
        processes.append(started(lock=lock))
        return processes[-1].pid

    monkeypatch.setattr(improving, "begun", begun)
    for _ in range(2):
        found = improving.begin_improving(run, ARGS)["pid"]
        assert improving.begin_improving(run, ARGS)["pid"] == found == processes[-1].pid
        assert found != other.pid
        processes[-1].kill()
        processes[-1].wait()
    assert len(processes) == 2
