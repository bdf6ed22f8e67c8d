"""Measure every arm at every level, on text of the model's own kind and of others.

Each result is a file of its own, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.recovery.arms import ARMS, learned
from llmaas_plugins.elastic.metadata import Elastic
from llmaas_plugins.elastic.units import Widths
from llmaas_plugins.training.objectives import Quality
from llmaas_plugins.training.recovery import Recipe, Texts, judge, run_identity
from llmaas_plugins.training.student import Teacher
from llmaas_plugins.training.trainer import Kept

__all__ = ["Material", "Row", "study"]

Row = Mapping[str, Any]
Windows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Material:
    """Model, texts and settings of the study.

    Attributes:
        path: Prepared file.
        elastic: Its metadata.
        table: Name of the table of widths.
        training: Windows to learn from.
        kinds: Windows to judge by, by kind of text.
        recipe: How to learn.
        folder: Folder of results and of runs that were stopped.
    """

    path: Path
    elastic: Elastic
    table: str
    training: Windows
    kinds: Mapping[str, Windows]
    recipe: Recipe
    folder: Path

    def widths(self, level: float) -> Widths:
        """Return the widths of a level."""
        return self.elastic.tables[self.table][self.elastic.levels.index(level)]

    def identity(self, arm: str, levels: Sequence[float], recipe: Recipe) -> str:
        """Return the SHA-256 of everything that a run for these levels depends on."""
        texts = Texts(self.training, self.training)
        run = run_identity(self.path, self.widths(levels[0]), texts, recipe)
        about = [run, asdict(ARMS[arm]), list(levels), list(self.elastic.levels)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def study(material: Material, arms: Sequence[str], levels: Sequence[float]) -> list[Row]:
    """Return a row for each arm, level and kind of text."""
    material.folder.mkdir(parents=True, exist_ok=True)
    teacher, rows = Teacher(material.path), list[Row]()
    for level in levels:
        for arm in arms:
            if ARMS[arm].trains != "nested":
                rows += _rows(material, teacher, arm, [level])
    for arm in arms:
        if ARMS[arm].trains == "nested":
            rows += _rows(material, teacher, arm, sorted(levels, reverse=True))
    return rows


def _rows(material: Material, teacher: Teacher, arm: str, levels: Sequence[float]) -> Iterator[Row]:
    """Yield the rows of one run, measured now or earlier."""
    asked = json.dumps([levels, {kind: _digest(each) for kind, each in material.kinds.items()}])
    identity = material.identity(arm, levels, material.recipe)
    name = hashlib.sha256((identity + asked).encode()).hexdigest()[:24]
    path = material.folder / f"{name}.json"
    if not path.exists():
        rows = _measured(material, teacher, arm, levels)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.replace(path)
    yield from json.loads(path.read_text(encoding="utf-8"))


def _measured(material: Material, teacher: Teacher, arm: str, levels: Sequence[float]) -> list[Row]:
    widths, started = [material.widths(level) for level in levels], time.monotonic()

    def kept(recipe: Recipe) -> Kept:
        identity = material.identity(arm, levels, recipe)
        return Kept(material.folder / f"{identity[:24]}.npz", identity)

    n_tokens = 0
    with tqdm(desc=f"{arm}, {levels[0]}", unit="token", unit_scale=True, disable=None) as bar:

        def progress(n: int, loss: float) -> None:
            nonlocal n_tokens
            n_tokens += n
            bar.update(n)
            bar.set_postfix(loss=f"{loss:.3f}")

        found = learned(
            ARMS[arm], teacher, widths, material.training, material.recipe, kept, progress
        )
    seconds = time.monotonic() - started
    return [
        {
            "arm": arm,
            "level": level,
            "kind": kind,
            "n_tokens": n_tokens,
            "rank": material.recipe.rank,
            "seconds": seconds,
            **_readings(judge(one, windows)),
        }
        for level, one in zip(levels, found, strict=True)
        for kind, windows in material.kinds.items()
    ]


def _readings(found: Sequence[Quality]) -> dict[str, list[float]]:
    """Return the windows' qualities by name."""
    return {name: [getattr(one, name) for one in found] for name in Quality._fields}


def _digest(windows: Windows) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows, "<i4").tobytes()).hexdigest()
