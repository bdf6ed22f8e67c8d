"""Judge a tuned model in the sparse mode, with channel files that were made in several ways.

Each file and each result is kept, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_eval.tasks.answering import WAYS, answers
from llmaas_eval.tasks.questions import Asked, Task, asked, mixed, text_of
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.model.digest import file_digest

__all__ = ["ARMS", "SPARSITIES", "WHOLE", "Material", "Row", "study"]

Row = Mapping[str, Any]

WHOLE = "whole"
"""Arm without the sparse mode."""
DISTILLED = "distilled"
ARMS: Mapping[str, Sequence[str]] = {
    "none": ("pack", "--sparse", "--equal-shares"),
    "own shares": ("pack", "--sparse"),
    DISTILLED: ("distill",),
}
"""Commands of ``llmaas flash`` that make the channel files."""
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
_CHARACTERS = 6
"""Characters of text for a token: more than usual, so that there is enough text."""


@dataclass(frozen=True, slots=True)
class Material:
    """Model, questions and settings of the study.

    Attributes:
        model: Tuned model.
        tasks: Tasks.
        n_tokens: Tokens to distill on.
        folder: Folder for files and results.
        seed: Seed of the order of the text to distill on.
    """

    model: Path
    tasks: Mapping[str, Task]
    n_tokens: int
    folder: Path
    seed: int


def study(material: Material, arms: Sequence[str], ways: Sequence[str]) -> list[Row]:
    """Return a row for each task, arm, way and sparsity; the whole model has one for each task."""
    material.folder.mkdir(parents=True, exist_ok=True)
    questions = _tokens(material)
    rows = _rows(material.folder, material.model, {"mode": "exact"}, questions, WAYS[0])
    found: list[Row] = [{"arm": WHOLE, "sparsity": 0.0, **row} for row in rows]
    for arm in arms:
        model = _with_channels(material, arm)
        for way in ways:
            for sparsity in SPARSITIES:
                table = {"mode": "sparse", "sparsity": sparsity, "selection": "top_k"}
                rows = _rows(material.folder, model, table, questions, way)
                found += [{"arm": arm, "sparsity": sparsity, **row} for row in rows]
    return found


# -- inside --------------------------------------------------------------------------------------


def _tokens(material: Material) -> Mapping[str, Sequence[Asked]]:
    from llama_cpp import Llama

    with contextlib.closing(Llama(str(material.model), vocab_only=True, verbose=False)) as llama:

        def tokenize(text: str) -> list[int]:
            return list(llama.tokenize(text.encode(), add_bos=False))

        return {
            name: [asked(task, one, tokenize) for one in task.held_out]
            for name, task in material.tasks.items()
        }


def _with_channels(material: Material, arm: str) -> Path:
    """Return a copy of the model with an arm's channel file beside it; make both if necessary."""
    folder = material.folder / arm.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    path = folder / material.model.name
    if not path.exists():
        os.link(material.model, path)
    if not channel_path(path).exists():
        options = ["--tokens", str(material.n_tokens)] if arm == DISTILLED else []
        _flash("pack", path)  # `distill` does not pack the model, and it is faster packed
        _flash(*ARMS[arm], path, "--text", _text(material), *options)
    return path


def _flash(*arguments: object) -> None:
    """Run a command of ``llmaas flash``; what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        code = llmaas(["flash", *map(str, arguments)])
    if code:
        raise RuntimeError(f"`llmaas flash {arguments[0]}` returned {code}, expected 0")


def _text(material: Material) -> Path:
    """Return the file of the questions to distill on, with their answers."""
    path = material.folder / "text.txt"
    if not path.exists():
        lines, n_characters = list[str](), 0
        for task, question in mixed(material.tasks, material.seed + 1):
            lines.append(text_of(task, question))
            n_characters += len(lines[-1])
            if n_characters > _CHARACTERS * material.n_tokens:
                break
        partial = path.with_suffix(".partial")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(path)
    return path


def _rows(
    folder: Path,
    model: Path,
    table: Mapping[str, Any],
    questions: Mapping[str, Sequence[Asked]],
    way: str,
) -> Iterator[Row]:
    """Yield a row for each task, measured now or earlier."""
    channels = channel_path(model)
    file = file_digest(channels) if channels.exists() else ""
    for task, some in questions.items():
        about = [file_digest(model), file, table, way, some]
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        path = folder / f"{name}.json"
        if not path.exists():
            label = f"{task}, {way}, {table.get('sparsity', 'whole')}"
            found = answers(model, table, some, way, label)
            row = {"task": task, "way": way, "n_choices": len(some[0].choices)} | found._asdict()
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(row), encoding="utf-8")
            partial.replace(path)
        yield json.loads(path.read_text(encoding="utf-8"))
