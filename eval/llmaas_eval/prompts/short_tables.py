"""Tables of shortened prompts: facts that are kept, and predictions that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.prompts.rows import Row, means, paired, rows_of
from llmaas_eval.prompts.shorter import WHOLE
from llmaas_eval.stats import Interval, mean_interval
from llmaas_eval.tables import Maker, Output, Table, between, number, percent, spread

__all__ = ["TABLES"]

_BASES = ("random", "self_information")
"""Scorers that all others are compared with."""


def _facts(outputs: Sequence[Output]) -> Table:
    """Show by scorer how many questions are answered right after equally many tokens."""
    rows = rows_of(outputs, "facts")
    heads = ["must stay", "share", "scorer", "kept", "right"]
    heads += [f"points above {base}" for base in _BASES]
    whole = means((row for row in rows if row["scorer"] == WHOLE), _context, "right")
    right = between(100 * np.array(_mean(whole)), 1, " %")
    lines = [["", percent(1), WHOLE, percent(1), right, *[""] * len(_BASES)]]
    lines += _compared(rows, _context, "right", lambda one: between(100 * np.array(one), 1, " %"))
    return Table(heads, lines, "lrlrr" + "r" * len(_BASES))


def _continuation(outputs: Sequence[Output]) -> Table:
    """Show by scorer how far predictions are from those after the whole prompt."""
    rows = rows_of(outputs, "continuation")
    heads = ["must stay", "share", "scorer", "kept", "KL, nats"]
    heads += [f"more than {base}" for base in _BASES]
    lines = _compared(rows, _passage, "kl", lambda one: between(one, 3))
    return Table(heads, lines, "lrlrr" + "r" * len(_BASES))


def _continuation_kinds(outputs: Sequence[Output]) -> Table:
    """Show the same by kind of conversation."""
    rows = rows_of(outputs, "continuation")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = []
    for protection, share, scorer in _arms(rows):
        cells = [protection, percent(share), scorer]
        for kind in kinds:
            some = _some([row for row in rows if row["kind"] == kind], protection, share, scorer)
            cells.append(number(float(np.mean([row["kl"] for row in some])), 3))
        lines.append(cells)
    return Table(["must stay", "share", "scorer", *kinds], lines, "lrl" + "r" * len(kinds))


# -- inside --------------------------------------------------------------------------------------


def _compared(
    rows: Sequence[Row],
    unit: Callable[[Row], Any],
    key: str,
    shown: Callable[[Interval], str],
) -> list[list[str]]:
    """Return a line for each arm: its values, and how much they are above each base's.

    Args:
        rows: Rows of the study.
        unit: Returns the unit of a row; units are independent of each other.
        key: Name of the values.
        shown: Returns the cell of a mean.
    """
    scale, digits = (100, 1) if key == "right" else (1, 3)
    lines = []
    for protection, share, scorer in _arms(rows):
        some = _some(rows, protection, share, scorer)
        found = means(some, unit, key)
        kept = percent(float(np.mean([row["kept"] for row in some])), 1)
        cells = [protection, percent(share), scorer, kept, shown(_mean(found))]
        for base in _BASES:
            other = means(_some(rows, protection, share, base), unit, key)
            if scorer == base or not other:
                cells.append("")
                continue
            values, bases = paired(found, other)
            cells.append(spread(scale * np.array(mean_interval(values - bases)), digits))
        lines.append(cells)
    return lines


def _arms(rows: Iterable[Row]) -> list[tuple[str, float, str]]:
    """Return protection, share and scorer of all arms, in an order that suits tables."""
    found = {(row["protection"], row["share"], row["scorer"]): None for row in rows}
    scorers = list(dict.fromkeys(scorer for _, _, scorer in found))
    return sorted(
        (one for one in found if one[2] != WHOLE),
        key=lambda one: (one[0], -one[1], scorers.index(one[2])),
    )


def _some(rows: Sequence[Row], protection: str, share: float, scorer: str) -> list[Row]:
    wanted = protection, share, scorer
    return [row for row in rows if (row["protection"], row["share"], row["scorer"]) == wanted]


def _mean(values: Mapping[Any, float]) -> Interval:
    return mean_interval(np.array(list(values.values())))


def _context(row: Row) -> tuple[str, int]:
    return row["probe"], row["context"]


def _passage(row: Row) -> int:
    return int(row["number"])


TABLES: Mapping[str, Maker] = {
    "prompts-facts": _facts,
    "prompts-continuation": _continuation,
    "prompts-continuation-kinds": _continuation_kinds,
}
