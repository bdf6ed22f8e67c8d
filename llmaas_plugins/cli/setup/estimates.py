"""How long the steps of ``llmaas setup`` take, and how much disk, from a probe of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.elastic.estimates import Speeds
from llmaas_plugins.cli.setup.processes import completed, error_of
from llmaas_plugins.cli.setup.steps import (
    N_REQUESTS,
    RECOVER,
    WORDS,
    Job,
    improving_steps,
    recovering_s,
)
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.json_text import parse_json

__all__ = ["Estimates", "estimates_of"]

_LEVELS = 5.4
"""Sum of the nine levels."""
_PROFILED = 10_000
"""Prompt tokens that are timed at each level: nine lengths, three times, with two thread counts."""
_TIMED = 500
"""Tokens after a prompt that are timed at each level, one by one."""
_ALONE = 12
"""Time of a token that is evaluated alone, relative to one of a prompt."""
_COMPARED = 750
"""Tokens of all levels together that comparing the answers to a prompt evaluates."""
_FULL_REQUESTS = 1000
_BYTES = 4
"""Bytes of a chat export for each of its tokens."""


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
        StoreError: The folder for scores cannot be made.
    """
    n_bytes = job.model.stat().st_size
    packing = n_bytes if "pack" not in job.skipped else 0
    if not job.is_prepared_here:
        return Estimates({}, packing)
    with as_store_error(f"cannot make {job.folder}"):
        job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    searching = [*improving_steps(job)[0].arguments, "--dry-run"]  # all steps of `prepare`
    done = completed(searching, shows_errors=False)
    if done.returncode:
        raise ConfigError(f"{error_of(done)} `--skip prepare` leaves levels out.")
    found = parse_json(done.stdout)
    chats = sum(path.stat().st_size for path in job.chats)
    seconds = _seconds(found, chats, n_bytes) | {RECOVER: recovering_s(job), WORDS: _WORDS_S}
    return Estimates(seconds, found["disk_bytes"] + packing)


def _seconds(found: Mapping[str, Any], n_chat_bytes: int, n_bytes: int) -> dict[str, float]:
    """Return the seconds of each step from the dry run of ``llmaas elastic prepare``."""
    speeds = Speeds(**found["speeds"])
    steps = {
        step["what"]: 0 if step["is_done"] else step["seconds"] or 0 for step in found["steps"]
    }
    search_s = sum(seconds for what, seconds in steps.items() if what.split()[0] in _SEARCHING)
    level_s = _LEVELS * speeds.read_s
    profile_s = level_s * (_PROFILED + _ALONE * _TIMED)
    return {
        "prepare": sum(steps.values()) - search_s,
        "pack": n_bytes * speeds.store_s,
        "profile": profile_s,
        "learn": N_REQUESTS * _COMPARED * speeds.read_s,
        "datastore": n_chat_bytes / _BYTES * speeds.read_s,
        "search": search_s,
        "profile searched": profile_s,
        "learn searched": _FULL_REQUESTS * _COMPARED * speeds.read_s,
    }


_WORDS_S = 1800.0
"""Seconds to explain answers and to train an encoder, of which the former is bounded."""
_SEARCHING = ("search", "add")
"""First words of the steps that follow the uniform widths."""
