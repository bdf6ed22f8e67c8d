"""Pictures of the study: methods by app (Fig 15 of ElastiLM), the grid (18d), and settings (5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from llmaas_eval.deadlines.alone.answering import OURS
from llmaas_eval.deadlines.alone.cells import Cells, models_of
from llmaas_eval.deadlines.alone.promises import APART
from llmaas_eval.deadlines.loaded.baselines import SCRATCH

__all__ = ["draw"]

_SHOWN = ("agrees", "right")
_Rows = Sequence[Mapping[str, Any]]


def draw(rows: _Rows, folder: Path) -> None:
    """Plot what the rows of each model have."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models_of([{"rows": rows}]):
        cells = Cells([{"rows": rows}], model)
        _draw_apps(cells, folder / f"alone-apps-{model}.png")
        if SCRATCH in cells.methods:
            _draw_grid(cells, folder / f"alone-grid-{model}.png")
        some = [row for row in rows if row["row"] == "setting" and row["model"] == model]
        _draw_settings(some, folder / f"alone-settings-{model}.png")


# -- inside --------------------------------------------------------------------------------------


def _draw_apps(cells: Cells, path: Path) -> None:
    """Plot the means of all methods under each app's promise."""
    cases = cells.app_cases()
    figure = Figure(figsize=(12, 6), layout="constrained")
    panels = figure.subplots(len(_SHOWN), 1, sharex=True)
    width = 0.8 / len(cells.methods)
    for name, axes in zip(_SHOWN, panels, strict=True):
        for i, by in enumerate(cells.methods):
            found = [cells.values(case, by) for case in cases.values()]
            heights = [0.0 if one is None else 100 * one[name].mean() for one in found]
            axes.bar(np.arange(len(cases)) + width * i, heights, width, label=by)
        axes.set(ylabel=f"{name} (%)", xticks=np.arange(len(cases)) + 0.4 - width / 2)
    labels = [f"{app}\n{case.first:.0%} / {case.further:.0%}" for app, case in cases.items()]
    panels[-1].set_xticklabels(labels)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def _draw_grid(cells: Cells, path: Path) -> None:
    """Plot how many points ours has above models trained from scratch, over the grid."""
    cases = cells.cases(APART)
    firsts = sorted({case.first for case in cases}, reverse=True)
    furthers = sorted({case.further for case in cases})
    figure = Figure(figsize=(4.5 * len(_SHOWN), 4), layout="constrained")
    for name, axes in zip(_SHOWN, figure.subplots(1, len(_SHOWN)), strict=True):
        gains = np.full((len(firsts), len(furthers)), np.nan)
        for i, first in enumerate(firsts):
            for j, further in enumerate(furthers):
                some = [case for case in cases if (case.first, case.further) == (first, further)]
                found = cells.joined(some, [OURS, SCRATCH])
                if found:
                    both = [found[by][name].mean() for by in (OURS, SCRATCH)]
                    gains[i, j] = 100 * (both[0] - both[1])
        _draw_map(
            axes,
            gains,
            furthers,
            firsts,
            f"{name}: points above {SCRATCH}, apps that both serve",
            "coolwarm",
        )
        axes.set(xlabel="further tokens: limit", ylabel="first token: limit")
    figure.savefig(path, dpi=110)


def _draw_settings(rows: _Rows, path: Path) -> None:
    """Plot how often answers agree with the whole model's by the levels of prompt and answer."""
    prompts, answers = (sorted({row["levels"][i] for row in rows}, reverse=not i) for i in range(2))
    shares = np.full((len(prompts), len(answers)), np.nan)
    for i, prompt in enumerate(prompts):
        for j, answer in enumerate(answers):
            some = [row["agrees"] for row in rows if row["levels"] == [prompt, answer]]
            if some:
                shares[i, j] = 100 * np.mean(some)
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_map(axes, shares, answers, prompts, "agrees with the whole model (%)", "viridis")
    axes.set(xlabel="level of the answer", ylabel="level of the prompt")
    figure.savefig(path, dpi=110)


def _draw_map(  # noqa: PLR0913, PLR0917  parts of a panel
    axes: Axes,
    values: NDArray[np.float64],
    across: Sequence[float],
    down: Sequence[float],
    title: str,
    colors: str,
) -> None:
    """Plot a table of numbers as colors, with the numbers in it."""
    is_signed = colors == "coolwarm"
    limit = max(1.0, float(np.nanmax(np.abs(values)))) if not np.isnan(values).all() else 1.0
    axes.imshow(values, cmap=colors, vmin=-limit if is_signed else 0, vmax=limit, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else f"{value:+.0f}" if is_signed else f"{value:.0f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(across)), [f"{each:.0%}" for each in across])
    axes.set_yticks(range(len(down)), [f"{each:.0%}" for each in down])
    axes.set_title(title)
