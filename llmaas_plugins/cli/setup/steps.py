"""Steps of ``llmaas setup``: each is a command that the user could run alone.

A step runs in a process of its own, so its memory is free again before the next one begins.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.setup.extents import Extents
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.setup.record import Done, folder_of, key_of
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.body import PACKAGE

__all__ = [
    "RECOVER",
    "STEPS",
    "WITHOUT",
    "WORDS",
    "Job",
    "Step",
    "holds",
    "improving_steps",
    "run",
    "steps_of",
    "widths_of",
]

RECOVER, WORDS = "recover", "words"
STEPS = ("prepare", "pack", "profile", "learn", "datastore", RECOVER, WORDS)
"""Names of the steps, in their order. The last two are done only in the background."""
WITHOUT = {
    RECOVER: "The levels are used without adapters.",
    WORDS: "Words of prompts are judged by the attention of the model.",
}
"""Steps whose failure is no failure of the command, and what follows from it."""

_LARGE = ", because the model is large"
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Job:
    """A model to set up, and how.

    Attributes:
        model: Path of the model.
        digest: Digest of the model.
        chats: Chat exports for the datastore; without any, there is none.
        skipped: Names of steps to leave out.
        table: Widths of a model that is prepared already; None for another model.
    """

    model: Path
    digest: str
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
        if not self.is_prepared_here:
            return self.model
        return self.model.with_name(f"{self.model.name.removesuffix(_GGUF)}.elastic{_GGUF}")

    @property
    def extents(self) -> Extents:
        """How much the steps evaluate."""
        return Extents(self.model, self.digest)

    @property
    def n_chat_bytes(self) -> int:
        """Size of the chat exports."""
        return sum(path.stat().st_size for path in self.chats)

    @property
    def folder(self) -> Path:
        """Folder of the record, the scores and the log."""
        return folder_of(self.digest)

    @property
    def store(self) -> Path:
        """Folder of the datastore, which fits only this model."""
        return self.folder.parent.parent / f"knn-{self.digest[:32]}"


class Step(NamedTuple):
    """A step.

    Attributes:
        name: Name, for ``--skip``.
        what: Its work, in words.
        arguments: Arguments of ``llmaas``.
        inputs: Files that it reads.
        table: Widths that it measures; None if it depends on none.
        is_timed: Whether it measures how long an app would take.
    """

    name: str
    what: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...]
    table: str | None = None
    is_timed: bool = False

    @property
    def command(self) -> str:
        """Command that does the step, as somebody would type it."""
        return shlex.join(("llmaas", *self.arguments))

    def key(self, job: Job) -> str:
        """Return a name of what the step does with the files as they are.

        Raises:
            ConfigError: A file cannot be read.
            StoreError: A model cannot be read.
        """
        models = {job.model, job.made}
        digests = [
            file_digest(path) if path in models else hashlib.sha256(content_of(path)).hexdigest()
            for path in self.inputs
        ]
        return key_of(self.arguments, [*digests, *widths_of(job.made, self.table)])


def steps_of(job: Job) -> list[Step]:
    """Return the steps of a job, in the order in which one needs what the others made."""
    made, table = str(job.made), job.table or "uniform"
    known = {
        "prepare": Step(
            "prepare",
            "order heads and neurons by importance, and write uniform widths",
            (*_prepare(job), "--no-search", "--json"),
            (job.model,),
        ),
        "pack": Step(
            "pack",
            "pack the weights for this processor",
            ("flash", "pack", made),
            (job.made,),
        ),
        "profile": _profile(job, "profile", table),
        "learn": _learn(job, "learn", table, job.extents.n_requests),
        "datastore": _datastore(job),
    }
    left_out = set(job.skipped) | (set() if job.chats else {"datastore"})
    left_out |= set() if job.is_prepared_here else {"prepare"}
    left_out |= set() if job.is_prepared_here or job.table else {"profile", "learn"}
    return [step for name, step in known.items() if name not in left_out]


def improving_steps(job: Job) -> list[Step]:
    """Return the steps that find better widths; none of them changes the file's weights.

    Adapters are learned if torch is installed, and words if the pretrained encoder is, too.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    known = {
        "prepare": Step(
            "search",
            "search widths by their effect on predictions",
            (*_prepare(job), "--json"),
            (job.model,),
        ),
        **({RECOVER: _recover(job)} if has_torch else {}),
        "profile": _profile(job, "profile searched", "searched"),
        "learn": _learn(job, "learn searched", "searched", job.extents.n_more_requests),
        **({WORDS: _words(job)} if has_torch and importlib.util.find_spec(PACKAGE) else {}),
    }
    return [step for name, step in known.items() if name not in job.skipped]


def holds(step: Step, job: Job, done: Done) -> bool:
    """Return whether the result of a step is still there, and fits.

    Raises:
        ConfigError: The prepared file is damaged.
        StoreError: A file cannot be read.
    """
    check = _CHECKS.get(step.name)
    if check is not None:
        return check(job, done)
    return done.result is None or Path(done.result).exists()


def run(step: Step) -> str | None:
    """Run a step, with its progress on stderr; return the path of its result, if it says one.

    Raises:
        ConfigError: The step failed.
    """
    done = completed(step.arguments, is_timed=step.is_timed)
    if done.returncode:
        raise ConfigError(
            f"step {step.name} failed: `{step.command}`. The same command goes on once that works; "
            f"`--skip {step.name.split()[0]}` leaves the step out."
        )
    path = _json(done.stdout).get("path")
    return path if isinstance(path, str) else None


def widths_of(made: Path, table: str | None) -> list[str]:
    """Return what names a table's widths, which the digest of a file does not count.

    Args:
        made: The file.
        table: Name of the table. If it is None, or the file lacks it, there are no names.
    """
    from llmaas_plugins.elastic.level_identity import levels_key
    from llmaas_plugins.elastic.metadata import read_elastic

    elastic = None if table is None else read_elastic(made)
    if elastic is None or table is None or table not in elastic.tables:
        return []
    adapters = elastic.adapters.get(table)
    return [levels_key(elastic.levels, elastic.tables[table], elastic.biases_of(table), adapters)]


# -- inside --------------------------------------------------------------------------------------


def _prepare(job: Job) -> tuple[str, ...]:
    scores = str(job.folder / "scores.npz")  # beside the model, they might be of another one
    return ("elastic", "prepare", str(job.model), "-o", str(job.made), "--scores", scores)


def _datastore(job: Job) -> Step:
    n_characters, what = job.extents.n_characters(job.n_chat_bytes), "the chats"
    options = () if n_characters is None else ("--characters", str(n_characters))
    if n_characters is not None:
        what = f"the first {n_characters:,} characters of the chats"
    store = "--model", str(job.made), "--store", str(job.store)
    return Step(
        "datastore",
        f"select what {what} can tell the model",
        ("datastore", "build", *map(str, job.chats), *store, *options, "--json"),
        (job.made, *job.chats),
    )


def _recover(job: Job) -> Step:
    tokens = str(job.extents.n_recovered)
    arguments = ("elastic", "recover", str(job.made), "--table", "searched", "--tokens", tokens)
    what = "learn adapters that win back part of what the levels lose"
    # by layers, because apps need the memory meanwhile
    return Step(RECOVER, what, (*arguments, "--by-layers", "--json"), (job.made,), "searched")


def _words(job: Job) -> Step:
    what = "learn which words of prompts the answers need"
    return Step(WORDS, what, ("prompts", "learn", str(job.made), "--json"), (job.made,))


def _profile(job: Job, name: str, table: str) -> Step:
    extents, what = job.extents, "measure how long each level takes"
    lengths = ",".join(map(str, extents.lengths))
    options = () if extents.are_lengths_usual else ("--prompts", lengths)
    if extents.has_few_lengths:
        what += f" with prompts of {lengths.replace(',', ' and ')} tokens only{_LARGE}"
    arguments = ("elastic", "profile", str(job.made), "--table", table, *options, "--json")
    return Step(name, what, arguments, (job.made,), table, is_timed=True)


def _learn(job: Job, name: str, table: str, n_requests: int | None) -> Step:
    what = "measure how often each level answers as the whole model"
    if n_requests is not None and job.extents.has_few_requests:
        what += f" to {n_requests} prompts only{_LARGE}"
    options = () if n_requests is None else ("--requests", str(n_requests))
    arguments = ("deadlines", "learn", str(job.made), "--table", table, *options, "--json")
    return Step(name, what, arguments, (job.made,), table)


def _json(content: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError:
        return {}  # text, which not all commands print as JSON
    return found if isinstance(found, dict) else {}


def _has_table(table: str) -> Callable[[Job, Done], bool]:
    def check(job: Job, done: Done) -> bool:
        from llmaas_plugins.elastic.metadata import read_elastic

        if not job.made.exists() or file_digest(job.made) != done.digest:
            return False
        elastic = read_elastic(job.made)
        return elastic is not None and table in elastic.tables

    return check


def _is_packed(job: Job, _done: Done) -> bool:
    from llmaas_plugins.cli.flash.pack import is_packed, tensors_of

    return is_packed(job.made, tensors_of(job.made))


def _is_profiled(table: str | None) -> Callable[[Job, Done], bool]:
    def check(job: Job, _done: Done) -> bool:
        from llmaas_plugins.elastic.latency import latency_path

        return latency_path(job.made, table or job.table or "uniform").exists()

    return check


_CHECKS: Mapping[str, Callable[[Job, Done], bool]] = {
    "prepare": _has_table("uniform"),
    "pack": _is_packed,
    "profile": _is_profiled(None),
    "search": _has_table("searched"),
    "profile searched": _is_profiled("searched"),
}
"""Functions that check a step's result by more than that it exists."""
