"""The study's results as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, number, only

__all__ = ["TABLES", "best_ms", "perplexity", "report"]


def report(document: Output) -> str:
    """Return the table."""
    return _table([document]).as_markdown()


def perplexity(row: Mapping[str, Any]) -> float:
    """Return a row's perplexity."""
    return math.exp(float(np.mean(row["nats"])))


def best_ms(row: Mapping[str, Any]) -> float:
    """Return a row's fastest milliseconds a token."""
    return float(min(row["ms"]))


def _table(outputs: Sequence[Output]) -> Table:
    rows = only(outputs)["rows"]
    if not rows:
        raise NoRowsError("no rows of configurations")
    base = np.array(rows[0]["nats"])
    lines = [_line(row, base) for row in rows]
    heads = ["", "", "bits a weight", "in memory, % of F16", "perplexity", "over F16"]
    return Table([*heads, "ms a token", "median"], lines, "llrrrrrr")


def _line(row: Mapping[str, Any], base: Any) -> list[str]:
    ratio = [math.exp(each) for each in mean_interval(np.array(row["nats"]) - base)]
    return [
        row["family"],
        row["setting"],
        number(row["bits"], 2),
        number(100 * row["memory"], 1),
        number(perplexity(row)),
        between(ratio, 3),
        number(best_ms(row), 1),
        number(float(np.median(row["ms"])), 1),
    ]


TABLES: Mapping[str, Maker] = {"sparse-pareto": _table}
