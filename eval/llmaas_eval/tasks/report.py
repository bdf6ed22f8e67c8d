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
_LAST = "distilled", "none"
_DIFFERENCES = (("none", _WHOLE), ("distilled", _WHOLE), _LAST)

_Values = NDArray[np.float64]
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


def rights(rows: Sequence[Mapping[str, Any]]) -> Mapping[_Key, _Values]:
    """Return which answers are right by task, arm, way and sparsity; ``ALL`` joins the tasks."""
    return _by_key(rows, "right")


def _by_key(rows: Sequence[Mapping[str, Any]], name: str) -> Mapping[_Key, _Values]:
    """Return a value of each question; a row that is there twice counts once."""
    found: dict[_Key, _Values] = {}
    for row in rows:
        key = row["task"], row["arm"], row["way"], row["sparsity"]
        found[key] = np.array(row[name], np.float64)
    joined: dict[_Key, list[_Values]] = {}
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
    nats, lines = _by_key(rows, "nats"), []
    for task, way, sparsity in sorted(cases, key=_order(rows)):
        mine = {arm: found.get((task, arm, way, sparsity)) for arm in arms} | {_WHOLE: whole[task]}
        cells = ("" if one is None else percent(float(one.mean()), 1) for one in mine.values())
        gains = [_gain(mine[arm], mine[base], 100, 1) for arm, base in pairs]
        if _LAST in pairs:
            after, before = (nats.get((task, arm, way, sparsity)) for arm in _LAST)
            gains.append(_gain(after, before, 1, 3))
        lines.append([task, way, percent(sparsity), *cells, *gains])
    heads = ["task", "sparse", "left out", "whole model", *arms[1:]]
    heads += [f"{arm} − {'whole model' if base == _WHOLE else base}" for arm, base in pairs]
    heads += [f"nats, {_LAST[0]} − {_LAST[1]}"] if _LAST in pairs else []
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _gain(found: _Values | None, base: _Values | None, factor: float, digits: int) -> str:
    """Return how much more ``found`` has a question; empty if one was not measured."""
    if found is None or base is None:
        return ""
    return spread(mean_interval(factor * (found - base)), digits)


def _order(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a key that sorts cases by way, task and sparsity, as they were measured."""
    tasks = [*dict.fromkeys(row["task"] for row in rows), ALL]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    return lambda case: (ways.index(case[1]), tasks.index(case[0]), case[2])


TABLES: Mapping[str, Maker] = {"sparse-tasks": _table}
