"""Plots of the studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from llmaas_eval.knn.rows import by_user
from llmaas_eval.knn.scoring import Row
from llmaas_eval.stats import perplexity

__all__ = ["draw_bars", "draw_curves"]


def draw_bars(rows: Sequence[Row], path: Path) -> None:
    """Plot each user's perplexity by method over that of the model alone (Fig 3)."""
    users = by_user(rows)
    methods = [name for name in next(iter(users.values())) if name != "pure"]
    figure = Figure(figsize=(2 + len(users), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        ratios = [
            perplexity(found[method].surprise) / perplexity(found["pure"].surprise)
            for found in users.values()
        ]
        axes.bar(np.arange(len(users)) + (i + 0.5) * width - 0.4, ratios, width, label=method)
    axes.axhline(1, color="gray")
    axes.set(ylabel="perplexity over the model's alone")
    axes.set(xticks=range(len(users)), xticklabels=list(users))
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Plot perplexity against the share of kept pairs, one panel per user (Fig 9)."""
    users = by_user(rows)
    figure = Figure(figsize=(1 + 4 * len(users), 4), layout="constrained")
    for axes, (user, found) in zip(
        figure.subplots(1, len(users), squeeze=False)[0], users.items(), strict=True
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in found.values():
            share = row.n_pairs / row.n_history
            name = row.method.rpartition(" ")[0]
            if name:
                lines.setdefault(name, []).append((share, perplexity(row.surprise)))
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), ".-", label=name)
        axes.axhline(perplexity(found["full"].surprise), color="gray", linestyle=":", label="full")
        axes.set(title=user, xlabel="pairs kept", ylabel="perplexity")
        axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)
