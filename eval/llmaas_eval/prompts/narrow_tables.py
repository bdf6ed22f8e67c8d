"""Tables of recall with narrow prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.prompts.rows import Row, means, paired, rows_of
from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import Maker, Output, Table, between, percent, spread

__all__ = ["TABLES"]

_ARMS = {
    "prompt": "prompt narrow",
    "conversation": "conversation narrow, question whole",
    "all": "prompt and answer narrow",
}
_FAR = 1 << 30
_DISTANCES = ((0, 150), (150, 250), (250, _FAR))


def _narrow_recall(outputs: Sequence[Output]) -> Table:
    """Show accuracy by level, and how much lower it is than the whole model's."""
    rows = rows_of(outputs, "narrow_recall")
    heads = ["facts", "level"]
    for name in _ARMS.values():
        heads += [f"{name}: right", "points less"]
    lines = []
    for probe in dict.fromkeys(row["probe"] for row in rows):
        some = [row for row in rows if row["probe"] == probe]
        lines += [
            [probe, percent(level), *_cells(some, level, _ARMS)]
            for level in dict.fromkeys(row["level"] for row in some)
        ]
    return Table(heads, lines, "lr" + "rr" * len(_ARMS))


def _narrow_distance(outputs: Sequence[Output]) -> Table:
    """Show accuracy with a narrow prompt by the distance of the fact."""
    rows = rows_of(outputs, "narrow_recall")
    heads = ["facts", "level"]
    for low, high in _DISTANCES:
        name = f"{low}–{high} tokens" if high < _FAR else f"{low} tokens or more"
        heads += [f"{name}: right", "points less"]
    lines = []
    for probe in dict.fromkeys(row["probe"] for row in rows):
        some = [row for row in rows if row["probe"] == probe]
        parts = [[row for row in some if low <= row["distance"] < high] for low, high in _DISTANCES]
        for level in dict.fromkeys(row["level"] for row in some):
            cells = [cell for part in parts for cell in _cells(part, level, ["prompt"])]
            lines.append([probe, percent(level), *cells])
    return Table(heads, lines, "lr" + "rr" * len(_DISTANCES))


def _cells(rows: Sequence[Row], level: float, arms: Iterable[str]) -> list[str]:
    """Return the accuracy of each arm at a level, and its difference from the whole model's."""

    def right(arm: str, level: float) -> dict[Any, float]:
        some = (row for row in rows if (row["arm"], row["level"]) == (arm, level))
        return means(some, lambda row: (row["probe"], row["context"]), "right")

    cells = []
    for arm in arms:
        found, whole = paired(right("prompt" if level == 1 else arm, level), right("prompt", 1.0))
        if not len(found):
            cells += ["", ""]
            continue
        less = "" if level == 1 else spread(100 * np.array(mean_interval(found - whole)), 1)
        cells += [between(100 * np.array(mean_interval(found)), 1, " %"), less]
    return cells


TABLES: Mapping[str, Maker] = {
    "prompts-narrow-recall": _narrow_recall,
    "prompts-narrow-distance": _narrow_distance,
}
