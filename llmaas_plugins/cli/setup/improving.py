"""Better levels after ``llmaas setup``, in the background: searched widths, and adapters.

The prepared file's weights stay the same: it gets a second table of widths, and adapters for it.
The new levels are timed and compared before the configuration names that table, so apps never lack
measured times.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.setup.config_text import names_model
from llmaas_plugins.cli.setup.improver import found_improver, improver_lock, set_improver
from llmaas_plugins.cli.setup.processes import begun
from llmaas_plugins.cli.setup.running import Run
from llmaas_plugins.cli.setup.steps import improving_steps

__all__ = ["begin_improving", "improve"]

_LOG = "improve.log"
_GLANCE_S, _STEP_S = 2.0, 0.02
"""Time in which whoever has the lock writes its number or only looked, and between two tries."""


def begin_improving(run: Run, args: argparse.Namespace) -> dict[str, Any] | None:
    """Start the work in the background; return its process and log, or None if it is done.

    The process is None if another one has the lock and does not say who it is.

    Raises:
        StoreError: The files for the process cannot be written.
    """
    if run.is_improved():
        return None
    arguments = ["setup", str(run.job.model), "--improve", "-o", str(run.config)]
    for option, values in (("--chats", run.job.chats), ("--skip", sorted(run.job.skipped))):
        arguments += [option, *map(str, values)] if values else []
    arguments += ["--memory", args.memory] if args.memory else []
    folder = run.job.folder
    deadline = time.monotonic() + _GLANCE_S
    while (process := _begun_or_found(folder, arguments)) is None and time.monotonic() < deadline:
        time.sleep(_STEP_S)
    return {"pid": process, "log": str(folder / _LOG)}


def improve(run: Run) -> dict[str, float]:
    """Improve the levels, time and compare them, and switch the model's configuration to them.

    Returns:
        The seconds of each step.

    Raises:
        ConfigError: The model is not set up, or a step failed.
        StoreError: A file cannot be written, or another run is at work.
    """
    left = [step.name for step in run.steps if not run.is_done(step)]
    if left or not run.job.is_prepared_here:
        raise ConfigError(
            f"{run.job.model} is not set up: run `llmaas setup {run.job.model}` first, with the "
            "same options."
        )
    with run.locked(), improver_lock(run.job.folder) as lock:
        if lock is not None:  # else this process is in the background, and inherited it
            set_improver(lock, os.getpid())
        seconds = run.do(improving_steps(run.job))
        if not names_model(run.config, run.job.model):
            run.say(f"{run.config} does not name {run.job.model} any more, so it stays as it is.")
            return seconds
        try:
            run.write("searched")
        except ConfigError as error:
            run.say(f'{error} Set table = "searched" in [plugins.elastic] to use the new widths.')
    return seconds


# -- inside --------------------------------------------------------------------------------------


def _begun_or_found(folder: Path, arguments: Sequence[str]) -> int | None:
    """Return the process that improves the model, which this starts unless one does already."""
    with improver_lock(folder) as lock:
        if lock is None:  # an earlier run started it, or somebody looks who has the lock
            return found_improver(folder)
        process = begun(arguments, folder / _LOG, lock)
        set_improver(lock, process)
        return process
