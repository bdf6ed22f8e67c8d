"""Pictures of strategies under one limit, of steps, and of missing parts (Figs 4b, 18b and 18c)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from llmaas_eval.prompts.design_outcomes import (
    ALL_LIMITS,
    STEP_SIZES,
    WHOLE,
    costs_of,
    in_part,
    in_steps,
    mean_of_possible,
    parts,
    steps,
    strategies,
)
from llmaas_eval.prompts.design_tables import EXAMPLE
from llmaas_eval.prompts.gap import Cost
from llmaas_eval.prompts.rows import Row, mean_by_document

__all__ = ["draw_design"]

Values = NDArray[np.float64]


def draw_design(rows: Sequence[Row], costs: Mapping[float, Sequence[float]], folder: Path) -> None:
    """Plot strategies under the limits of Fig 4b, and means over all limits of steps and parts."""
    folder.mkdir(parents=True, exist_ok=True)
    cost = costs_of(list(costs.items()))
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    in_fine, in_parts = in_steps(rows).documents, in_part(rows, WHOLE).documents
    found = strategies(rows, cost, EXAMPLE)
    _bars(panels[0], found, in_fine, "{} % / {} %".format(*EXAMPLE))
    _bars(panels[1], _steps(rows, cost), in_fine, "steps, all limits")
    _bars(panels[2], _parts(rows, cost), in_parts, "without a part")
    figure.savefig(folder / "prompts-design.png", dpi=110)


# -- inside --------------------------------------------------------------------------------------


def _steps(rows: Sequence[Row], cost: Mapping[float, Cost]) -> Mapping[str, Values | None]:
    found = [steps(rows, cost, limits) for limits in ALL_LIMITS]
    some = [one for one in found if all(pair[0] is not None for pair in one.values())]
    return {f"{size} %": mean_of_possible(one[size][0] for one in some) for size in STEP_SIZES}


def _parts(rows: Sequence[Row], cost: Mapping[float, Cost]) -> Mapping[str, Values | None]:
    found = [parts(rows, cost, limits) for limits in ALL_LIMITS]
    some = [one for one in found if all(values is not None for values in one.values())]
    return {name: mean_of_possible(one[name] for one in some) for name in found[0]}


def _bars(
    axes: Axes, found: Mapping[str, Values | None], documents: NDArray[np.str_], title: str
) -> None:
    """Plot means with their intervals, one below another."""
    for at, values in enumerate(found.values()):
        if values is not None:
            mean, low, high = 100 * np.array(mean_by_document(values, documents))
            axes.barh(at, mean, xerr=[[mean - low], [high - mean]], color="tab:blue")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="agree with the whole model (%)")
