"""Quality of answers, with a missed promise counted as wrong.

A served request has the levels that the service used and whether its promise was kept. Its answer
is that of a model with a meaning at these levels. So times and answers are of different models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.deadlines.loaded.probes import Probe, Served
from llmaas_eval.deadlines.loaded.scoring import Scores

__all__ = ["AppScores", "outcomes"]


class AppScores(NamedTuple):
    """Answers of a model to an app's questions.

    Attributes:
        scores: Answers by question and levels.
        levels: Levels, widest first.
        row_of: Row of each of the app's questions.
        whole: Choices of the whole model.
        right: Right choices.
        whole_nats: Mean -log p of the right choice's tokens by the whole model.
    """

    scores: Scores
    levels: Sequence[float]
    row_of: Mapping[int, int]
    whole: Sequence[int]
    right: Sequence[int]
    whole_nats: Sequence[float]


def outcomes(probe: Probe, apps: Mapping[str, AppScores]) -> list[dict[str, Any]]:
    """Return the quality of each request of a probe, in the trace's order.

    A request has ``app``, ``is_met``, ``agrees`` and ``right`` (0 or 1, and 0 if it missed), and
    ``nats``: how much less likely the right text is than for the whole model, met or not.
    """
    return [_outcome(one, apps[one.app]) for one in probe.served]


def _outcome(one: Served, app: AppScores) -> dict[str, Any]:
    row = app.row_of[one.question]
    pair = [_index(app.levels, level) for level in one.levels]
    choice = int(app.scores.choice[row, pair[0], pair[1]])
    if choice < 0:
        raise ValueError(f"{one.app} was not answered at the levels {one.levels}")
    return {
        "app": one.app,
        "is_met": int(one.is_met),
        "agrees": int(one.is_met and choice == app.whole[row]),
        "right": int(one.is_met and choice == app.right[row]),
        "nats": float(app.scores.nats[row, pair[0], pair[1]]) - app.whole_nats[row],
    }


def _index(levels: Sequence[float], level: float) -> int:
    """Return the index of the widest level that is not wider than ``level``."""
    return int(np.argmax(np.asarray(levels) <= level + 1e-9))
