"""The study's results as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import Interval, ratio_of_means
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, number, percent

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
                percent(row["level"]),
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
    found = {_key(row): row for row in rows}
    lines = []
    asked = dict.fromkeys(_key(row)[:3] for row in rows)
    for level, arm, n_tokens in sorted(asked, key=lambda each: -each[0]):
        row = found[level, arm, n_tokens, kinds[0]]
        cells = [percent(level), arm, f"{n_tokens:,}", number(float(np.mean(row["kl"])), 3)]
        for kind in kinds:
            base, mine = found.get((level, NONE, 0, kind)), found[level, arm, n_tokens, kind]
            share = None if base is None or arm == NONE else closure(mine, base)
            cells.append("" if share is None else f"{100 * share.value:.0f} %")
        lines.append(cells)
    heads = ["level", "recovery", "tokens", f"KL, {kinds[0]}", *(f"won back, {k}" for k in kinds)]
    return Table(heads, lines, "rlrr" + "r" * len(kinds))


def _orders(outputs: Sequence[Output]) -> Table:
    """Compare files whose units have different orders, by the arms that all of them have."""
    rows = [(output["order"], row) for output in outputs for row in output["rows"]]
    kinds = list(dict.fromkeys(row["kind"] for _, row in rows))
    found = {(order, *_key(row)): row for order, row in rows}
    orders = dict.fromkeys(order for order, _ in rows)
    asked = dict.fromkeys(_key(row)[:3] for _, row in rows)
    lines = []
    for key in sorted(asked, key=lambda each: -each[0]):
        if not all((order, *key, kinds[0]) in found for order in orders):
            continue
        for order in orders:
            mine = [found[order, *key, kind] for kind in kinds]
            cells = [percent(key[0]), order, key[1], number(float(np.mean(mine[0]["kl"])), 3)]
            more = [math.exp(np.mean(row["loss"]) - np.mean(row["whole"])) for row in mine]
            lines.append([*cells, *(number(each) for each in more)])
    heads = ["level", "order", "recovery", f"KL, {kinds[0]}", *kinds]
    return Table(heads, lines, "rllr" + "r" * len(kinds))


def _key(row: Mapping[str, Any]) -> tuple[float, str, int, str]:
    return row["level"], row["arm"], row["n_tokens"], row["kind"]


TABLES: Mapping[str, Maker] = {
    "elastic-recovery": _recovery,
    "elastic-recovery-orders": _orders,
}
