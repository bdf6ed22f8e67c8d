"""The study's results as tables: arms trained, by sparsities used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import Interval, ratio_of_means
from llmaas_eval.tables import Output, Table, between, number

__all__ = ["closure", "report"]

_NONE = "none"
"""Name of the arm without training."""


def report(document: Output) -> str:
    """Return the tables of each kind of text."""
    rows = document["rows"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    parts = [f"{kind}:\n\n{_matrix(rows, kind).as_markdown()}" for kind in kinds]
    about = (
        f"{document['n_tokens']:,} tokens an arm. Cells: perplexity, and the share of the "
        "log-perplexity gap to the dense model that was won back."
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
    found = {(row["arm"], row["sparsity"]): row for row in rows if row["kind"] == kind}
    used = sorted({sparsity for _, sparsity in found})
    lines = []
    for arm in dict.fromkeys(arm for arm, _ in found):
        cells = [arm]
        for sparsity in used:
            row, base = found[arm, sparsity], found.get((_NONE, sparsity))
            cell = number(math.exp(np.mean(row["loss"])))
            if base is not None and arm != _NONE:
                share = closure(row, base)
                cell += f" ({between([100 * each for each in share], 0, ' %')})"
            cells.append(cell)
        lines.append(cells)
    heads = ["trained", *(f"{sparsity:.0%}".replace("%", " %") for sparsity in used)]
    return Table(heads, lines, "l" + "r" * len(used))
