"""Record of a run, kept with its measurements: command, machine, versions and date."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from llmaas_plugins.machine import processor_name

__all__ = ["RunRecord", "run_record"]

RunRecord = dict[str, str | dict[str, str]]


def run_record() -> RunRecord:
    """Return the running command, the machine, the versions of packages, and today's date."""
    names = ("llama-cpp-python", "llmaas-plugins")
    return {
        "command": _command(sys.orig_argv),
        "machine": f"{os.cpu_count()} cores of {processor_name()}",
        "versions": {name: version(name) for name in names},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _command(arguments: list[str]) -> str:
    """Return a command as somebody would type it; an installed script without its folder."""
    _, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return shlex.join([Path(rest[0]).name, *rest[1:]])
    return shlex.join(["python", *rest])
