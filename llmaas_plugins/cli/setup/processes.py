"""Commands of ``llmaas`` in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["begun", "completed"]

_LLMAAS = (sys.executable, "-P", "-m", "llmaas_plugins.cli.main")


def completed(
    arguments: Sequence[str], *, shows_output: bool = False, shows_errors: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its status, and what it did not show.

    Args:
        arguments: Arguments of ``llmaas``.
        shows_output: Whether its output is this process's.
        shows_errors: Whether its errors and progress are this process's.
    """
    return subprocess.run(  # noqa: S603  our own program
        [*_LLMAAS, *arguments],
        stdout=None if shows_output else subprocess.PIPE,
        stderr=None if shows_errors else subprocess.PIPE,
        text=True,
        check=False,
    )


def begun(arguments: Sequence[str], log: Path) -> int:
    """Start a command that outlives this process; return its process's number."""
    with log.open("ab") as file:
        process = subprocess.Popen(  # noqa: S603  our own program
            [*_LLMAAS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return process.pid
