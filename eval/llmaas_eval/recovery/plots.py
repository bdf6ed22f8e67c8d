"""Plots of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llmaas_eval.recovery.report import NONE, closure

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Plot KL and the share won back by level and arm, on the first kind of text."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = [row for row in rows if row["kind"] == rows[0]["kind"]]
    bases = {row["level"]: row for row in mine if row["arm"] == NONE}
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm in dict.fromkeys(row["arm"] for row in mine):
        found = sorted((row["level"], row) for row in mine if row["arm"] == arm)
        left.plot(*zip(*((x, float(np.mean(row["kl"]))) for x, row in found), strict=True), "o-")
        shares = [(x, closure(row, bases[x])) for x, row in found if x in bases and arm != NONE]
        points = [(x, share.value) for x, share in shares if share is not None]
        right.plot(*(zip(*points, strict=True) if points else ([], [])), "o-", label=arm)
    left.set(xlabel="level", ylabel="KL (nats)", yscale="log")
    right.set(xlabel="level", ylabel="share of the gap won back")
    right.legend()
    figure.savefig(folder / "elastic-recovery.png", dpi=120)
