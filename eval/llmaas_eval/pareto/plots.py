"""Plot of the study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from llmaas_eval.pareto.report import best_ms, perplexity

__all__ = ["draw"]

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Plot perplexity against memory and against time, a line for each family."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, rows, lambda row: 100 * float(row["memory"]))
    _lines(right, rows, best_ms)
    left.set(xlabel="weights in memory (% of F16)", ylabel="perplexity", yscale="log")
    right.set(xlabel="ms a token (random 200 M model, one thread)", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter())
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(folder / "sparse-pareto.png", dpi=110)


def _lines(axes: Any, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    for family in dict.fromkeys(_family(row) for row in rows):
        mine = [row for row in rows if _family(row) == family]
        points = [(value(row), perplexity(row)) for row in mine]
        axes.plot(*zip(*points, strict=True), ".--", label=family)
        if family == "llama.cpp":
            for row, point in zip(mine, points, strict=True):
                axes.annotate(
                    row["setting"], point, (0, -3), textcoords="offset points",
                    rotation=-60, va="top", fontsize=7,
                )  # fmt: skip


def _family(row: Row) -> str:
    """Return the line that a row belongs to: streamed configurations have lines of their own."""
    is_streamed = row["setting"].endswith("in memory") and row["family"] != "exact"
    return f"{row['family']}, streamed" if is_streamed else str(row["family"])
