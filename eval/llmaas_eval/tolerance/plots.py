"""Pictures of the studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from llmaas_eval.tolerance.arms import Row
from llmaas_eval.tolerance.report import by_arm, curves

__all__ = ["draw_bars", "draw_curves", "draw_tasks"]


def draw_bars(rows: Sequence[Row], path: Path) -> None:
    """Draw perplexity and bytes of each arm, like the paper's Fig 6b."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    perplexity, stored = figure.subplots(1, 2)
    arms = by_arm(rows)
    names = ["f16", *(name for name, _ in arms)]
    exact = np.mean([row["exact_surprise"] for row in rows])
    more = [0.0, *(np.mean([row["surprise"] for row in found]) for found in arms.values())]
    values = np.exp(exact + np.array(more))
    perplexity.bar(names, values)
    perplexity.set(ylabel="perplexity", ylim=(0.98 * values.min(), 1.02 * values.max()))
    shares = [1.0, *(np.mean([row["share"] for row in found]) for found in arms.values())]
    stored.bar(names, shares)
    stored.set(ylabel="stored bytes over f16's")
    for axes in (perplexity, stored):
        axes.tick_params(axis="x", labelrotation=30)
    figure.savefig(path.with_suffix(".png"), dpi=120)


def draw_tasks(rows: Sequence[Row], arms: Sequence[tuple[str, float]], path: Path) -> None:
    """Draw the KL divergence of ``arms`` by task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(arms)
    for i, (name, mean) in enumerate(arms):
        found = by_arm(rows)[name, mean]
        kl = [np.mean([row["kl"] for row in found if row["task"] == task]) for task in tasks]
        place = np.arange(len(tasks)) + (i + 0.5) * width - 0.4
        axes.bar(place, kl, width, label=f"{name}, {mean:g} bits")
    axes.set(yscale="log", ylabel="KL (nats)", xticks=range(len(tasks)), xticklabels=tasks)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def draw_curves(panels: Mapping[str, Sequence[Row]], value: str, path: Path) -> None:
    """Draw ``value`` against stored bytes in each panel, one line for each way to assign bits."""
    figure = Figure(figsize=(2 + 6 * len(panels), 5), layout="constrained")
    labels = {"kl": "KL (nats)", "right": "right answers"}
    for axes, (title, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, (shares, values) in curves(rows, value).items():
            axes.plot(shares, values, ".-", label=name)
        axes.set(title=title, xlabel="stored bytes over f16's", ylabel=labels[value])
        if value == "kl":
            axes.set(yscale="log")
        axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)
