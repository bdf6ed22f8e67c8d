"""Plot of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from llmaas_eval.tasks.report import rights

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Plot accuracy by sparsity, a panel for each task and each way."""
    folder.mkdir(parents=True, exist_ok=True)
    found = rights(rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != "whole"]
    size = 1 + 3.5 * len(tasks), 0.5 + 3 * len(ways)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(ways), len(tasks), squeeze=False)
    for way, line in zip(ways, panels, strict=True):
        for task, axes in zip(tasks, line, strict=True):
            whole = next(right for key, right in found.items() if key[:2] == (task, "whole"))
            axes.axhline(100 * whole.mean(), color="gray", linestyle=":", label="whole model")
            for arm in arms:
                keys = sorted(key for key in found if key[:3] == (task, arm, way))
                axes.plot(
                    [100 * k[3] for k in keys],
                    [100 * found[k].mean() for k in keys],
                    "o-",
                    label=arm,
                )
            axes.set(title=f"{task}; sparse: {way}", xlabel="left out (%)", ylabel="right (%)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(folder / "sparse-tasks.png", dpi=110)
