"""Plots of the study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from llmaas_eval.elastic.readings import Reading, perplexity
from llmaas_eval.elastic.rows import FULL, INTERPOLATED, OURS, Found, Row
from llmaas_eval.stats import mean_interval

__all__ = ["draw"]


def draw(found: Found, folder: Path) -> None:
    """Write plots of the parts that were measured as PNG files to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if found["levels"]:
        _draw_levels(found["levels"], folder / "elastic-quality.png")
    if found["layers"]:
        _draw_layers(found["layers"], folder / "elastic-layers.png")
    for part in ("calibration", "types"):
        if found[part]:
            figure, (axes,) = _panels(1)
            _lines(axes, found[part], perplexity)
            axes.set(ylabel="perplexity")
            axes.legend()
            figure.savefig(folder / f"elastic-{part}.png", dpi=120)


def _draw_levels(rows: Sequence[Row], path: Path) -> None:
    """Plot the quality of all methods at equal bytes, by level (Fig 10a)."""
    figure, panels = _panels(2)
    methods = {row.method for row in rows}
    equal = [row for row in rows if row.method + INTERPOLATED not in methods]
    _lines(panels[0], equal, lambda reading: float(reading.kl.mean()))
    _lines(panels[1], equal, lambda reading: float(reading.same.mean()))
    panels[0].set(ylabel="KL (nats)", yscale="log")
    panels[1].set(ylabel="same most likely token")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)


def _draw_layers(rows: Sequence[Row], path: Path) -> None:
    """Plot the loss increase by removed layer, largest first (Fig 10b)."""
    full = next(row.reading for row in rows if row.method == FULL)
    more = [
        (mean_interval(row.reading.nats - full.nats), row.method)
        for row in rows
        if row.method != FULL
    ]
    more.sort(reverse=True)
    figure, (axes,) = _panels(1)
    errors = [
        [found.value - found.low for found, _ in more],
        [found.high - found.value for found, _ in more],
    ]
    axes.bar([name for _, name in more], [found.value for found, _ in more], yerr=errors)
    axes.set(xlabel="layer removed", ylabel="loss increase (nats)")
    figure.savefig(path, dpi=120)


def _panels(n: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(1 + 5 * n, 4.5), layout="constrained")
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


def _lines(axes: Any, rows: Sequence[Row], value: Callable[[Reading], float]) -> None:
    axes.set_prop_cycle(color=colormaps["tab20"](np.arange(20)))
    for method in dict.fromkeys(row.method for row in rows):
        points = sorted((row.level, value(row.reading)) for row in rows if row.method == method)
        if method == FULL:
            if points[0][1] > 0:  # a logarithmic axis has no 0
                axes.axhline(points[0][1], color="gray", linestyle=":", label=method)
        else:
            style = "o-" if method.startswith(OURS) else ".--"
            axes.plot(*zip(*points, strict=True), style, label=method)
    axes.set(xlabel="level")
