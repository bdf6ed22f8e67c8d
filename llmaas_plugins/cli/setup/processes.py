"""Commands of ``llmaas`` in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SLEEPING", "begun", "completed", "error_of"]

SLEEPING = {"OMP_WAIT_POLICY": "passive"}
"""Variables of a process whose engine's threads sleep while they wait for each other.

By default they spin, so on a busy machine they take processors from the threads that they wait for.
libgomp reads the variables when it is loaded, so they must be set before the process starts.
"""
_running: list[subprocess.Popen[bytes]] = []
"""Processes that were started: Python warns of one that is forgotten."""
_LOWEST = 19
_LLMAAS = (sys.executable, "-P", "-m", "llmaas_plugins.cli.main")


def completed(
    arguments: Sequence[str],
    *,
    has_settings: bool = False,
    shows_output: bool = False,
    shows_errors: bool = True,
    is_timed: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its status, and what it did not show.

    Args:
        arguments: Arguments of ``llmaas``.
        has_settings: Whether the user's settings apply. Without them, files are made alike
            wherever and for whomever the command runs.
        shows_output: Whether its output is this process's.
        shows_errors: Whether its errors and progress are this process's.
        is_timed: Whether it measures times, so that its engine must wait as that of an app does.
    """
    return subprocess.run(  # noqa: S603  our own program
        [*_LLMAAS, *arguments],
        env=_environment(has_settings=has_settings, is_timed=is_timed),
        stdout=None if shows_output else subprocess.PIPE,
        stderr=None if shows_errors else subprocess.PIPE,
        text=True,
        check=False,
    )


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a command that failed, whose errors were not shown."""
    last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return last.removeprefix("llmaas: error: ")


def begun(arguments: Sequence[str], log: Path, lock: int) -> int:
    """Start a command that outlives this process, at the lowest priority; return its number.

    Args:
        arguments: Arguments of ``llmaas``.
        log: File for its output.
        lock: Descriptor of a lock, which the process inherits.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(  # noqa: S603  our own program
            [*_LLMAAS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            pass_fds=(lock,),
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST)
    _running.append(process)
    return process.pid


def _environment(*, has_settings: bool, is_timed: bool) -> dict[str, str]:
    variables = dict(os.environ)
    if not is_timed:
        variables = SLEEPING | variables  # what the user chose stays
    if has_settings:
        return variables
    kept = {name: value for name, value in variables.items() if not name.startswith("LLMAAS_")}
    return kept | {"LLMAAS_CONFIG": ""}
