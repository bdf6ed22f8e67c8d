"""Figures as PNG files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmaas_eval.switching.figures import Case, Figure
from llmaas_eval.switching.report import most_contexts, summary
from llmaas_eval.switching.results import RunResult

__all__ = ["contexts_under", "draw"]

_Runs = Sequence[tuple[Case, RunResult]]
_Lines = Mapping[str, Mapping[Any, float]]
"""Values of y by x, for every label."""


def draw(figure: Figure, runs: _Runs, limits_ms: Sequence[float], path: Path) -> None:
    """Draw ``figure`` into ``path``."""
    from matplotlib.figure import Figure as Canvas

    panels = _panels(figure, runs, limits_ms)
    canvas = Canvas(figsize=(5 * len(panels), 4.2), layout="constrained")
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        if figure.x is None:
            means = {label: points[None] for label, points in lines.items()}
            axis.barh(list(means), list(means.values()))
            axis.set(title=title, xlabel="mean switch latency (ms)")
            axis.invert_yaxis()
            continue
        for label, points in lines.items():
            if None in points:
                axis.axhline(points[None], linestyle=":", color="black", label=label)
            else:
                axis.plot(list(points), list(points.values()), ".-", label=label)
        axis.set(title=title, xlabel=figure.x.replace("_", " "))
        if figure.log_x:
            axis.set_xscale("log", base=2)
        if figure.counts_contexts:
            axis.set(ylabel="active contexts")
        else:
            axis.set(ylabel="mean switch latency (ms)")
            axis.set_yscale("symlog", linthresh=1)
    if figure.x is not None:
        axes[-1].legend()
    canvas.suptitle(figure.title)
    canvas.savefig(path, dpi=120)


def contexts_under(figure: Figure, runs: _Runs, limit_ms: float) -> _Lines:
    """Return the most contexts within ``limit_ms``, by x, for every label."""
    means: dict[str, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for case, run in runs:
        found = means[case.label][_x(figure, case)]
        if run.failure is None:
            found[case.contexts] = summary(run).mean_ms
    return {
        label: {x: most_contexts(by_n, limit_ms) for x, by_n in points.items()}
        for label, points in means.items()
    }


def _panels(figure: Figure, runs: _Runs, limits_ms: Sequence[float]) -> dict[str, _Lines]:
    if figure.counts_contexts:
        return {f"within {ms:g} ms": contexts_under(figure, runs, ms) for ms in limits_ms}
    panels: dict[str, dict[str, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for case, run in runs:
        if run.failure is None:
            panel = panels[str(getattr(case, figure.panel))]
            panel[case.label][_x(figure, case)] = summary(run).mean_ms
    return {title: dict(lines) for title, lines in panels.items()}


def _x(figure: Figure, case: Case) -> Any:
    if figure.x is None:
        return None
    return case.options.get(figure.x) if figure.x == "chunk_tokens" else getattr(case, figure.x)
