"""How long the steps of ``llmaas setup`` take, and how much disk, from a probe of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.elastic.estimates import Speeds, store_s
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.setup.steps import (
    RECOVER,
    WORDS,
    Job,
    improving_steps,
)
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.json_text import parse_json

__all__ = ["Estimates", "estimates_of"]


class Estimates(NamedTuple):
    """Estimates for a job.

    Attributes:
        seconds: Seconds by step; a step is missing if there is no estimate.
        disk_bytes: Most bytes of files beside the model.
    """

    seconds: Mapping[str, float]
    disk_bytes: int


def estimates_of(job: Job) -> Estimates:
    """Probe a model in another process, which takes seconds, and estimate each step.

    Raises:
        ConfigError: The model cannot be prepared.
        StoreError: The folder for scores cannot be made, or that of the model not written to.
    """
    n_bytes = job.model.stat().st_size
    packing = n_bytes if "pack" not in job.skipped else 0
    if not job.is_prepared_here:
        return Estimates({"pack": packing * store_s(job.made)} if packing else {}, packing)
    with as_store_error(f"cannot make {job.folder}"):
        job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    searching = [*improving_steps(job)[0].arguments, "--dry-run"]  # all steps of `prepare`
    done = completed(searching)  # with its progress bars
    if done.returncode:
        raise ConfigError(
            "the model was not probed, as said above. `--skip prepare` leaves levels out."
        )
    found = parse_json(done.stdout)
    return Estimates(_seconds(job, found, n_bytes), found["disk_bytes"] + packing)


def _seconds(job: Job, found: Mapping[str, Any], n_bytes: int) -> dict[str, float]:
    """Return the seconds of each step from the dry run of ``llmaas elastic prepare``."""
    speeds, extents = Speeds(**found["speeds"]), job.extents
    steps = {
        step["what"]: 0 if step["is_done"] else step["seconds"] or 0 for step in found["steps"]
    }
    search_s = sum(seconds for what, seconds in steps.items() if what.split()[0] in _SEARCHING)
    profile_s = extents.profiling_s(speeds.read_s)
    return {
        "prepare": sum(steps.values()) - search_s,
        "pack": n_bytes * speeds.store_s,
        "profile": profile_s,
        "learn": extents.learning_s(speeds.read_s),
        "datastore": extents.reading_s(speeds.read_s, job.n_chat_bytes),
        "search": search_s,
        "profile searched": profile_s,
        "learn searched": extents.learning_more_s(speeds.read_s),
        RECOVER: extents.recovering_s(),
        WORDS: _WORDS_S,
    }


_WORDS_S = 1800.0
"""Seconds to explain answers and to train an encoder, of which the former is bounded."""
_SEARCHING = ("search", "add")
"""First words of the steps that follow the uniform widths."""
