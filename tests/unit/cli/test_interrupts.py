"""Commands that are stopped, or whose output nobody reads: they end with one line, no traceback."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

from llmaas_plugins.cli import commands
from llmaas_plugins.cli import main as cli_main
from llmaas_plugins.cli.interrupts import Stopped, stoppable
from llmaas_plugins.cli.main import main

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "llmaas_plugins.cli.main"]
DURING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from llmaas_plugins.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def command(monkeypatch):
    """Return a function that replaces the action of ``llmaas plugins`` in this process."""

    def run(action):
        monkeypatch.setattr(commands, "run_command", lambda _argv: action())
        return main(["plugins"])

    return run


def stop(number):
    os.kill(os.getpid(), number)
    raise AssertionError("nobody took the signal")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_line_and_a_status(command, capsys, number, status):
    before = signal.getsignal(number)
    assert command(lambda: stop(number)) == status
    assert capsys.readouterr() == ("", "llmaas: stopped\n")
    assert signal.getsignal(number) is before


def test_a_lack_of_memory_is_a_line_and_a_status(command, capsys, monkeypatch):
    monkeypatch.setattr(cli_main, "close_stdout", lambda: None)  # pytest still needs it

    def act():
        raise MemoryError

    assert command(act) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("llmaas: error: out of memory. Close other programs")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_says_what_is_left(command, capsys, number, status):
    def act():
        with stoppable("nothing was written"):
            stop(number)

    assert command(act) == status
    assert capsys.readouterr().err == "llmaas: stopped; nothing was written\n"


def test_what_fails_because_it_was_stopped_is_no_error(command, capsys):
    def act():
        try:
            stop(signal.SIGINT)
        except Stopped as error:
            raise RuntimeError("a library made this of it") from error

    assert command(act) == 130
    assert capsys.readouterr().err == "llmaas: stopped\n"


def test_other_errors_stay_what_they_are(command):
    with pytest.raises(ZeroDivisionError):
        command(lambda: 1 // 0)


def test_a_signal_that_a_callback_swallows_comes_again(command, capsys):
    """llama.cpp's log callbacks swallow it while a model is loaded."""
    callback = ctypes.CFUNCTYPE(None)(lambda: stop(signal.SIGINT))
    came = []

    def act():
        callback()
        came.append("callback")
        signal.sigtimedwait([], 20)  # a wait that a signal ends
        raise AssertionError("the signal got lost")

    assert command(act) == 130
    assert came == ["callback"]
    assert capsys.readouterr().err == "llmaas: stopped\n"


@pytest.mark.parametrize("name", ["llmaas_plugins.cli.commands", "pydantic", "numpy", "llama_cpp"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_a_signal_while_modules_are_imported(name, number, status):
    script = DURING.format(name=name, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "llmaas: stopped\n")


@pytest.mark.parametrize(
    ("arguments", "statuses", "start"),
    [
        (("plugins",), {141}, subprocess.run),
        (("doctor", "--json"), {0}, fork_server.run),
        (("demo", "--help"), {0, 141}, fork_server.run),
    ],
)
@pytest.mark.slow
def test_a_reader_that_has_seen_enough(arguments, statuses, start):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = start([*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode in statuses, done.stderr) == (True, b"")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "start"),
    [(("plugins",), subprocess.run), (("doctor", "--json"), fork_server.run)],
)
@pytest.mark.slow
def test_output_on_a_full_disk(arguments, start):
    with FULL.open("wb") as full:
        done = start(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "llmaas: error: No space left on device\n"


def test_what_the_system_refuses_is_a_line(command, capsys, tmp_path):
    assert command((tmp_path / "none").read_text) == 2
    message = f"llmaas: error: {tmp_path / 'none'}: {os.strerror(errno.ENOENT)}\n"
    assert capsys.readouterr().err == message
