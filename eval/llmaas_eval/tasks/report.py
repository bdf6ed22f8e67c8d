"""The study's results as a table: accuracy by task, sparsity and channel file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, percent, spread

__all__ = ["ALL", "TABLES", "report", "rights"]

ALL = "all tasks"
_WHOLE = "whole"
_DIFFERENCES = (("none", _WHOLE), ("distilled", _WHOLE), ("distilled", "none"))

_Right = NDArray[np.float64]
_Key = tuple[str, str, str, float]
"""Task, arm, way and sparsity."""


def report(document: Output) -> str:
    """Return the table, and the tasks with their numbers of questions and choices."""
    rows = [row for row in document["rows"] if row["arm"] == _WHOLE]
    tasks = (
        f"{row['task']}: {len(row['right'])} questions, chance {percent(1 / row['n_choices'], 1)}."
        for row in rows
    )
    return "\n".join([_table([document]).as_markdown(), "", *tasks])


def rights(rows: Sequence[Mapping[str, Any]]) -> Mapping[_Key, _Right]:
    """Return which answers are right by task, arm, way and sparsity; ``ALL`` joins the tasks.

    A row that is there twice counts once.
    """
    found: dict[_Key, _Right] = {}
    for row in rows:
        key = row["task"], row["arm"], row["way"], row["sparsity"]
        found[key] = np.array(row["right"], np.float64)
    joined: dict[_Key, list[_Right]] = {}
    for (_, arm, way, sparsity), right in found.items():
        joined.setdefault((ALL, arm, way, sparsity), []).append(right)
    return found | {key: np.concatenate(each) for key, each in joined.items()}


def _table(outputs: Sequence[Output]) -> Table:
    rows = [row for output in outputs for row in output["rows"]]
    found, arms = rights(rows), list(dict.fromkeys(row["arm"] for row in rows))
    whole = {key[0]: right for key, right in found.items() if key[1] == _WHOLE}
    cases = dict.fromkeys((task, way, x) for task, arm, way, x in found if arm != _WHOLE)
    if not cases:
        raise NoRowsError("no rows of sparse answers")
    pairs = [pair for pair in _DIFFERENCES if set(pair) <= set(arms)]
    lines = []
    for task, way, sparsity in sorted(cases, key=_order(rows)):
        mine = {arm: found.get((task, arm, way, sparsity)) for arm in arms} | {_WHOLE: whole[task]}
        cells = ("" if one is None else percent(float(one.mean()), 1) for one in mine.values())
        gains = (_gain(mine[arm], mine[base]) for arm, base in pairs)
        lines.append([task, way, percent(sparsity), *cells, *gains])
    heads = ["task", "sparse", "left out", "whole model", *arms[1:]]
    heads += [f"{arm} − {'whole model' if base == _WHOLE else base}" for arm, base in pairs]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _gain(found: _Right | None, base: _Right | None) -> str:
    """Return how many points more of the answers are right; empty if one was not measured."""
    if found is None or base is None:
        return ""
    return spread(mean_interval(100 * (found - base)), 1)


def _order(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a key that sorts cases by way, task and sparsity, as they were measured."""
    tasks = [*dict.fromkeys(row["task"] for row in rows), ALL]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    return lambda case: (ways.index(case[1]), tasks.index(case[0]), case[2])


TABLES: Mapping[str, Maker] = {"sparse-tasks": _table}
