"""Pictures of shortened prompts (ElastiLM Figs 4a and 13a) and of its parts (Figs 4b, 18b, 18c)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from llmaas_eval.prompts.rows import Row
from llmaas_eval.prompts.word_scorer_tables import MEASURES, shown_scorers, values_of

__all__ = ["draw_shares"]


def draw_shares(rows: Sequence[Row], folder: Path) -> None:
    """Plot how well the words of each scorer replace the prompt, by their share."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 4), layout="constrained")
    shares = sorted({row["share"] for row in rows})
    panels = figure.subplots(1, len(MEASURES))
    for measure, axes in zip(MEASURES, panels, strict=True):
        for scorer, name in shown_scorers(rows).items():
            way = {"scorer": scorer, "unit": "words", "is_timed": False}
            means = [
                measure.scale * values_of(rows, measure.key, share=share, **way)[0].mean()
                for share in shares
            ]
            axes.plot([100 * share for share in shares], means, "o-", label=name)
        axes.set(xlabel="kept of the prompt's tokens (%)", ylabel=f"{measure.name}{measure.unit}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(folder / "prompts-words-by-share.png", dpi=110)
