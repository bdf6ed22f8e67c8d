"""Table of features on models of the sizes that people run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_eval.tables import Maker, Output, Table, number

__all__ = ["TABLES"]

_MOST_WORDS = 160
_WORKS, _SKIPPED = "works", "skipped"


def _table(outputs: Sequence[Output]) -> Table:
    """Show all that each feature took on a model, or time and memory on several side by side."""
    return _one(outputs[0]) if len(outputs) == 1 else _side_by_side(outputs)


TABLES: Mapping[str, Maker] = {"sizes": _table}
"""Function that makes the table."""

# -- inside --------------------------------------------------------------------------------------


def _one(output: Output) -> Table:
    heads = ["feature", "verdict", "time, s", "memory, GB", "with mapped files, GB", "read, GB",
             "longest silence, s", "last line"]  # fmt: skip
    rows = [
        [row["feature"], row["verdict"], *_figures(row), _cut(row["why"])] for row in output["rows"]
    ]
    return Table(heads, rows, "llrrrrrl")


def _side_by_side(outputs: Sequence[Output]) -> Table:
    models = [output["model"] for output in outputs]
    by_model = [{row["feature"]: row for row in output["rows"]} for output in outputs]
    names = dict.fromkeys(row["feature"] for output in outputs for row in output["rows"])
    rows = []
    for name in names:
        found = [rows_of.get(name) for rows_of in by_model]
        whys = dict.fromkeys(
            _cut(row["why"]) for row in found if row and row["verdict"] not in {_WORKS, _SKIPPED}
        )
        rows.append([name, *map(_cell, found), "; ".join(whys)])
    return Table(["feature", *models, "why not"], rows, "l" + "r" * len(models) + "l")


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != _WORKS:
        return str(row["verdict"])
    return f"{number(row['seconds'], 0)} s, {number(row['private_bytes'] / 1e9, 1)} GB"


def _figures(row: Mapping[str, Any]) -> list[str]:
    if "seconds" not in row:
        return [""] * 5
    sizes = (row["private_bytes"], row["resident_bytes"], row["read_bytes"])
    gigabytes = [number(size / 1e9, 2) for size in sizes]
    return [number(row["seconds"], 1), *gigabytes, number(row["silent_s"], 1)]


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"
