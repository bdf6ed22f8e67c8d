"""The study's results as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import Interval, ratio_of_means
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, number

__all__ = ["TABLES", "closure", "report"]

NONE = "none"
"""Name of the arm without recovery."""


def report(document: Output) -> str:
    """Return the tables of each kind of text."""
    kinds = dict.fromkeys(row["kind"] for row in document["rows"])
    parts = [f"{kind}:\n\n{_table(document['rows'], kind).as_markdown()}" for kind in kinds]
    about = (
        f"Table {document['table']!r}, rank {document['rank']}, {document['n_tokens']:,} tokens a "
        "level. The share won back is that of the log-perplexity gap to the whole model."
    )
    return "\n\n".join([*parts, about])


def closure(row: Mapping[str, Any], base: Mapping[str, Any]) -> Interval | None:
    """Return the share of the gap to the whole model that is won back, with its interval.

    Args:
        row: Row of an arm.
        base: Row of the level without recovery, on the same windows.

    Returns:
        The share; None at level 1.0, which has no gap.
    """
    gap = np.array(base["loss"]) - np.array(base["whole"])
    if gap.mean() <= 1e-6:
        return None
    return ratio_of_means(np.array(base["loss"]) - np.array(row["loss"]), gap)


def _table(rows: Sequence[Mapping[str, Any]], kind: str) -> Table:
    """Return a line for each arm and level on a kind of text."""
    mine = [row for row in rows if row["kind"] == kind]
    bases = {row["level"]: row for row in mine if row["arm"] == NONE}
    lines = []
    for row in sorted(mine, key=lambda row: -row["level"]):
        base = bases.get(row["level"])
        share = None if base is None or row is base else closure(row, base)
        lines.append(
            [
                f"{row['level']:.0%}".replace("%", " %"),
                row["arm"],
                f"{row['n_tokens']:,}",
                number(float(np.mean(row["kl"])), 4),
                number(math.exp(np.mean(row["loss"]))),
                number(math.exp(np.mean(row["whole"]))),
                "" if share is None else between([100 * each for each in share], 1, " %"),
            ]
        )
    heads = ["level", "recovery", "tokens", "KL", "perplexity", "whole model", "won back"]
    return Table(heads, lines, "rlrrrrr")


def _recovery(outputs: Sequence[Output]) -> Table:
    """Show each arm's KL and the share won back, on the first kind of text and on the others."""
    rows = [row for output in outputs for row in output.get("rows", ()) if "arm" in row]
    if not rows:
        raise NoRowsError("no rows of recovery")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    found = {(row["level"], row["arm"], row["kind"]): row for row in rows}
    lines = []
    asked = dict.fromkeys((row["level"], row["arm"]) for row in rows)
    for level, arm in sorted(asked, key=lambda each: -each[0]):
        row = found[level, arm, kinds[0]]
        cells = [f"{level:.0%}".replace("%", " %"), arm, f"{row['n_tokens']:,}"]
        cells.append(number(float(np.mean(row["kl"])), 3))
        for kind in kinds:
            base, mine = found.get((level, NONE, kind)), found[level, arm, kind]
            share = None if base is None or arm == NONE else closure(mine, base)
            cells.append("" if share is None else f"{100 * share.value:.0f} %")
        lines.append(cells)
    heads = ["level", "recovery", "tokens", f"KL, {kinds[0]}", *(f"won back, {k}" for k in kinds)]
    return Table(heads, lines, "rlrr" + "r" * len(kinds))


TABLES: Mapping[str, Maker] = {"elastic-recovery": _recovery}
