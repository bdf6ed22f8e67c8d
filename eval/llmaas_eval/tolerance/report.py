"""Rows of a study as JSON and as Markdown tables with paired intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.markdown import table
from llmaas_eval.stats import mean_interval
from llmaas_eval.tolerance.arms import Row

__all__ = [
    "DISTANCE",
    "KL",
    "PERPLEXITY",
    "Measure",
    "by_arm",
    "curves",
    "quality_table",
    "recall_table",
    "task_table",
]

_MIXED = "all"

Arms = tuple[str, float]
"""Name and mean bits of an arm."""
Pair = tuple[Arms, Arms]


class Measure(NamedTuple):
    """A column of the rows, with its title and scale."""

    title: str
    key: str
    scale: float
    is_distance: bool = False

    def of(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """Return one value for each row."""
        values = self.scale * _values(rows, self.key)
        return np.abs(values) if self.is_distance else values


KL = Measure("KL in 1e-4 nats", "kl", 1e4)
PERPLEXITY = Measure("Log perplexity minus that of f16 cells, in %", "surprise", 100)
DISTANCE = Measure(
    "Absolute difference of log perplexity from that of f16 cells, in %", "surprise", 100, True
)


def by_arm(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Return rows by arm and requested mean bits; each has the same texts in the same order."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["mean"]), []).append(row)
    return found


def quality_table(rows: Sequence[Row]) -> str:
    """Return a table with one line for each arm.

    Differences are to ``static`` at the same mean bits, text by text.
    """
    arms = by_arm(rows)
    heads = ["kept as", "bits", "stored", "KL", "first 8", "top-1, first 8", "perplexity"]
    heads += ["attention error", "KL less static's"]
    lines = []
    for (name, mean), found in arms.items():
        cells = [
            name,
            f"{_mean(found, 'bits'):.2f}",
            f"{_mean(found, 'share'):.2%}",
            f"{1e4 * _mean(found, 'kl'):.2f}",
            f"{1e4 * _mean(found, 'kl_first'):.2f}",
            f"{_mean(found, 'top1_first'):.2%}",
            _perplexity(found),
            f"{_mean(found, 'attention_error'):.2%}",
            _difference(found, arms.get(("static", mean), found), "kl", 1e4),
        ]
        lines.append(cells)
    return f"{table(heads, lines)}\n\nKL in 1e-4 nats; perplexity against f16 cells."


def task_table(rows: Sequence[Row], pairs: Sequence[Pair], measure: Measure) -> str:
    """Return a table of ``measure`` by task: both arms of each pair, and their difference."""
    heads, lines = ["task"], []
    for (a, mean), (b, _) in pairs:
        heads += [a, f"{b} at {mean:g} bits", "difference"]
    for task in [*dict.fromkeys(row["task"] for row in rows), _MIXED]:
        arms = by_arm(row for row in rows if task in {row["task"], _MIXED})
        cells = [task]
        for pair in pairs:
            one, other = (measure.of(arms[arm]) for arm in pair)
            cells += [f"{one.mean():.2f}", f"{other.mean():.2f}", _interval(one - other)]
        lines.append(cells)
    return f"{measure.title}:\n\n{table(heads, lines)}"


def recall_table(rows: Sequence[Row]) -> str:
    """Return a table of right answers and of nats for the right answer, by arm."""
    arms = by_arm(rows)
    heads = ["kept as", "bits", "stored", "right", "less f16's", "less static's", "nats"]
    heads.append("less static's")
    lines = []
    for (name, mean), found in arms.items():
        static = arms.get(("static", mean), found)
        cells = [
            name,
            f"{_mean(found, 'bits'):.2f}",
            f"{_mean(found, 'share'):.2%}",
            f"{_mean(found, 'right'):.1%}",
            _difference(found, arms["f16", 16.0], "right", 100),
            _difference(found, static, "right", 100),
            f"{_mean(found, 'nats'):.2f}",
            _difference(found, static, "nats", 1),
        ]
        lines.append(cells)
    return table(heads, lines)


def curves(rows: Sequence[Row], value: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the share of f16's bytes and the mean of ``value``, by arm."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for (name, _), points in sorted(by_arm(rows).items(), key=lambda item: item[0][1]):
        shares, values = found.setdefault(name, ([], []))
        shares.append(_mean(points, "share"))
        values.append(_mean(points, value))
    return found


def _values(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows], np.float64)


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(_values(rows, key).mean())


def _perplexity(rows: Sequence[Row]) -> str:
    found = mean_interval(_values(rows, "surprise"))
    mean, low, high = (100 * np.expm1(part) for part in found)
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def _difference(rows: Sequence[Row], others: Sequence[Row], key: str, scale: float) -> str:
    if rows is others:
        return ""
    return _interval(scale * (_values(rows, key) - _values(others, key)))


def _interval(values: NDArray[np.float64]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
