"""The study's results as tables: arms trained, by sparsities used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import Interval, mean_interval, ratio_of_means
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    between,
    number,
    percent,
    spread,
)

__all__ = ["TABLES", "closure", "report"]

_NONE = "none"
"""Name of the arm without training."""


def report(document: Output) -> str:
    """Return the tables of each kind of text, or the table of a finished channel file."""
    if "finished" in document:
        return _finished([document]).as_markdown()
    rows = document["rows"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    parts = [f"{kind}:\n\n{_matrix(rows, kind).as_markdown()}" for kind in kinds]
    about = (
        "Cells: perplexity, and the share of the log-perplexity gap to the dense model that was "
        "won back."
    )
    return "\n\n".join([*parts, about])


def closure(row: Mapping[str, Any], base: Mapping[str, Any]) -> Interval:
    """Return the share of the gap to the dense model that is won back, with its interval.

    Args:
        row: Row of an arm.
        base: Row without training at the same sparsity, on the same windows.
    """
    lost = np.array(base["loss"]) - np.array(base["whole"])
    return ratio_of_means(np.array(base["loss"]) - np.array(row["loss"]), lost)


def _matrix(rows: Sequence[Mapping[str, Any]], kind: str) -> Table:
    """Return a line for each arm, with a column for each sparsity in use."""
    mine = [row for row in rows if row["kind"] == kind]
    found = {(row["arm"], row["n_tokens"], row["sparsity"]): row for row in mine}
    used = sorted({row["sparsity"] for row in mine})
    lines = [["whole model", "", *[number(math.exp(np.mean(mine[0]["whole"])))] * len(used)]]
    for arm, n_tokens in dict.fromkeys((row["arm"], row["n_tokens"]) for row in mine):
        cells = [arm, f"{n_tokens:,}"]
        for sparsity in used:
            row, base = found[arm, n_tokens, sparsity], found.get((_NONE, 0, sparsity))
            cell = number(math.exp(np.mean(row["loss"])))
            if base is not None and arm != _NONE:
                share = closure(row, base)
                cell += f" ({between([100 * each for each in share], 0, ' %')})"
            cells.append(cell)
        lines.append(cells)
    heads = ["trained", "tokens", *(f"{sparsity:.0%}".replace("%", " %") for sparsity in used)]
    return Table(heads, lines, "lr" + "r" * len(used))


def _own_kind(outputs: Sequence[Output]) -> Table:
    """Show all arms on the first kind of text."""
    rows = _rows(outputs)
    return _matrix(rows, rows[0]["kind"])


def _other_kinds(outputs: Sequence[Output]) -> Table:
    """Show all arms on the other kinds of text."""
    rows = _rows(outputs)
    lines, table = list[Sequence[str]](), None
    for kind in list(dict.fromkeys(row["kind"] for row in rows))[1:]:
        table = _matrix(rows, kind)
        lines += [[kind, *line] for line in table.rows]
    if table is None:
        raise NoRowsError("no rows of a second kind of text")
    return Table(["text", *table.columns], lines, f"l{table.align}")


def _finished(outputs: Sequence[Output]) -> Table:
    """Show a finished channel file, with the change that the engine's own computation makes."""
    rows = _rows(outputs, "finished")
    ways = list(rows[0]["engine"])
    heads = ["text", "sparsity", "whole model", "none", "channel file", "won back"]
    lines = [
        [
            row["kind"],
            percent(row["sparsity"]),
            *(number(math.exp(np.mean(row[name]))) for name in ("whole", "none", "file")),
            between([100 * each for each in _won_back(row)], 0, " %"),
            *(_change(row["engine"][way], row["file"]) for way in ways),
        ]
        for row in rows
    ]
    return Table([*heads, *(f"engine, {way}" for way in ways)], lines, "lr" + "r" * (4 + len(ways)))


def _won_back(row: Mapping[str, Any]) -> Interval:
    return closure(
        {"loss": row["file"], "whole": row["whole"]}, {"loss": row["none"], "whole": row["whole"]}
    )


def _change(found: Sequence[float], base: Sequence[float]) -> str:
    """Return how much higher perplexity is than ``base``'s on the same windows, in percent."""
    more = mean_interval(np.array(found) - np.array(base))
    return spread([100 * math.expm1(each) for each in more], 2, " %")


def _rows(outputs: Sequence[Output], key: str = "rows") -> list[Mapping[str, Any]]:
    """Return the rows of all outputs, which have them under ``key``.

    Raises:
        NoRowsError: There are none.
    """
    rows = [row for output in outputs for row in output[key]]
    if not rows:
        raise NoRowsError("no rows of distillation")
    return rows


TABLES: Mapping[str, Maker] = {
    "sparse-distillation": _own_kind,
    "sparse-distillation-kinds": _other_kinds,
    "sparse-distillation-q4_0": _own_kind,
    "sparse-distillation-finished": _finished,
}
