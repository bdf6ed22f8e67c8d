"""Steps of ``llmaas setup``: each is a command that the user could run alone.

A step runs in a process of its own, so its memory is free again before the next one begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.models import trained_context
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.setup.record import key_of
from llmaas_plugins.model.digest import file_digest

__all__ = [
    "N_REQUESTS",
    "STEPS",
    "Job",
    "Step",
    "digests_of",
    "improving_steps",
    "run",
    "steps_of",
]

STEPS = ("prepare", "pack", "profile", "learn", "datastore")
"""Names of the steps, in their order."""

N_REQUESTS = 256
"""Prompts of the first outcome table; the one that follows has as many as the command's default."""
_LENGTHS = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Job:
    """A model to set up, and how.

    Attributes:
        model: Path of the model.
        chats: Chat exports for the datastore; without any, there is none.
        skipped: Names of steps to leave out.
        table: Widths of a model that is prepared already; None for another model.
    """

    model: Path
    chats: tuple[Path, ...] = ()
    skipped: frozenset[str] = frozenset()
    table: str | None = None

    @property
    def is_prepared_here(self) -> bool:
        """Whether a step prepares the model."""
        return self.table is None and "prepare" not in self.skipped

    @property
    def made(self) -> Path:
        """File that apps load in place of the model; the model itself if it stays as it is."""
        return self.model.with_suffix(".elastic.gguf") if self.is_prepared_here else self.model


class Step(NamedTuple):
    """A step.

    Attributes:
        name: Name, for ``--skip``.
        what: Its work, in words.
        arguments: Arguments of ``llmaas``.
        inputs: Files that it reads.
    """

    name: str
    what: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...]

    def key(self, digests: Sequence[str]) -> str:
        """Return a name of what the step does with files of these digests."""
        return key_of(self.arguments, digests)


def steps_of(job: Job) -> list[Step]:
    """Return the steps of a job, in the order in which one needs what the others made."""
    model, made, chats = str(job.model), str(job.made), tuple(map(str, job.chats))
    table = ("--table", job.table or "uniform")
    known = {
        "prepare": Step(
            "prepare",
            "order heads and neurons by importance, and write uniform widths",
            ("elastic", "prepare", model, "-o", made, "--no-search", "--json"),
            (job.model,),
        ),
        "pack": Step(
            "pack",
            "pack the weights for this processor",
            ("flash", "pack", made),
            (job.made,),
        ),
        "profile": Step(
            "profile",
            "measure how long each level takes",
            ("elastic", "profile", made, *table, *_lengths(job.model), "--json"),
            (job.made,),
        ),
        "learn": Step(
            "learn",
            "measure how often each level answers as the whole model",
            ("deadlines", "learn", made, *table, "--requests", str(N_REQUESTS), "--json"),
            (job.made,),
        ),
        "datastore": Step(
            "datastore",
            "select what the chats can tell the model",
            ("datastore", "build", *chats, "--model", made, "--json"),
            (job.made, *job.chats),
        ),
    }  # fmt: skip
    left_out = set(job.skipped) | (set() if job.chats else {"datastore"})
    left_out |= set() if job.is_prepared_here else {"prepare"}
    left_out |= set() if job.is_prepared_here or job.table else {"profile", "learn"}
    return [known[name] for name in STEPS if name not in left_out]


def improving_steps(job: Job) -> list[Step]:
    """Return the steps that find better widths; none of them changes the file's weights."""
    model, made, table = str(job.model), str(job.made), ("--table", "searched")
    known = {
        "prepare": Step(
            "search",
            "search widths by their effect on predictions",
            ("elastic", "prepare", model, "-o", made, "--json"),
            (job.model,),
        ),
        "profile": Step(
            "profile searched",
            "measure how long each level takes",
            ("elastic", "profile", made, *table, *_lengths(job.model), "--json"),
            (job.made,),
        ),
        "learn": Step(
            "learn searched",
            "measure how often each level answers as the whole model",
            ("deadlines", "learn", made, *table, "--json"),
            (job.made,),
        ),
    }
    return [step for name, step in known.items() if name not in job.skipped]


def digests_of(step: Step, job: Job) -> list[str]:
    """Return digests of the files that a step reads.

    Raises:
        ConfigError: A file cannot be read.
    """
    models = {job.model, job.made}
    return [
        file_digest(path) if path in models else hashlib.sha256(content_of(path)).hexdigest()
        for path in step.inputs
    ]


def run(step: Step) -> str | None:
    """Run a step, with its progress on stderr; return the path of its result, if it says one.

    Raises:
        ConfigError: The step failed.
    """
    done = completed(step.arguments)
    if done.returncode:
        raise ConfigError(
            f"step {step.name} failed: `llmaas {' '.join(step.arguments)}`. The same command goes "
            f"on once that works; `--skip {step.name.split()[0]}` leaves the step out."
        )
    path = _json(done.stdout).get("path")
    return path if isinstance(path, str) else None


# -- inside --------------------------------------------------------------------------------------


def _json(content: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}  # text, which not all commands print as JSON
    return found if isinstance(found, dict) else {}


def _lengths(model: Path) -> tuple[str, ...]:
    """Return the option for shorter prompts if the model was not trained with long ones."""
    n_trained = trained_context(model)
    if n_trained is None or n_trained >= _LENGTHS[-1]:
        return ()
    return ("--prompts", ",".join(str(n) for n in _LENGTHS if n <= n_trained))
