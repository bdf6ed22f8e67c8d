"""Pictures of the study: promises kept by rate (Fig 20a of ElastiLM), and answers by system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llmaas_eval.deadlines.loaded.systems import SYSTEMS

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Plot what the rows have: a panel for each kind of prompts and mix of apps."""
    folder.mkdir(parents=True, exist_ok=True)
    probes = [row for row in rows if row["row"] == "probe"]
    if probes:
        _draw_rates(probes, folder / "deadlines-rates.png")
    quality = [row for row in rows if row["row"] == "quality"]
    if quality:
        _draw_quality(quality, folder / "deadlines-quality.png")


def _draw_rates(probes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the share of requests that keep both limits by rate."""
    places = sorted({(row["kind"], row["alpha"]) for row in probes})
    figure = Figure(figsize=(1.5 + 4 * len(places), 3.6), layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for (kind, alpha), axes in zip(places, panels, strict=True):
        axes.axhline(90, color="gray", linestyle=":")
        for name, system in SYSTEMS.items():
            some = [
                r for r in probes if (r["system"], r["kind"], r["alpha"]) == (name, kind, alpha)
            ]
            some.sort(key=lambda row: row["rate"])
            if some:
                shares = [_share(row["apps"].values()) for row in some]
                axes.plot([row["rate"] for row in some], shares, "o-", label=system.label)
        axes.set(
            title=f"{kind} prompts, alpha = {alpha:g}", xlabel="requests a second", xscale="log",
            ylabel="both limits kept (%)", ylim=(0, 103),
        )  # fmt: skip
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


def _draw_quality(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the share of answers that agree with the whole model's, in time, at the lowest rate."""
    places = sorted({(row["model"], row["kind"], row["alpha"]) for row in rows})
    figure = Figure(figsize=(1.5 + 4 * len(places), 4), layout="constrained")
    for place, axes in zip(places, figure.subplots(1, len(places), squeeze=False)[0], strict=True):
        mine = [row for row in rows if (row["model"], row["kind"], row["alpha"]) == place]
        least = min(row["rate"] for row in mine)
        some = {
            row["by"]: 100 * float(np.mean(row["agrees"])) for row in mine if row["rate"] == least
        }
        axes.barh([*some], [*some.values()])
        axes.set(
            title=f"{place[0]} model, {place[1]}, alpha = {place[2]:g}, {least:.2g}/s",
            xlabel="agree, in time (%)", xlim=(0, 100),
        )  # fmt: skip
    figure.savefig(path, dpi=110)


def _share(apps: Any) -> float:
    counts = [*apps]
    return 100 * sum(each["both"] for each in counts) / sum(each["n"] for each in counts)
