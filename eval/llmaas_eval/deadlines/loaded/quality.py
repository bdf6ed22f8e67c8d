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

__all__ = ["WHOLE", "AppScores", "Setting", "outcomes", "setting_of"]

_ROUNDING = 1e-9


class Setting(NamedTuple):
    """Share of the prompt that is read, and indices of the levels of prompt and answer."""

    share: float
    prefill: int
    decode: int


WHOLE = Setting(1.0, 0, 0)
"""The whole prompt, and the whole model."""


class AppScores(NamedTuple):
    """Answers of a model to an app's questions.

    Attributes:
        by_setting: Answers by setting.
        levels: Levels, widest first.
        row_of: Row of each of the app's questions.
        whole: Answers of the whole model.
        right: Right choices.
    """

    by_setting: Mapping[Setting, Scores]
    levels: Sequence[float]
    row_of: Mapping[int, int]
    whole: Scores
    right: Sequence[int]


def outcomes(probe: Probe, apps: Mapping[str, AppScores]) -> list[dict[str, Any]]:
    """Return the quality of each request of a probe, in the trace's order.

    A request has ``is_met``, ``agrees`` and ``right`` (0 or 1, and 0 if it missed), and ``nats``:
    how much less likely the right text is than for the whole model, met or not.
    """
    return [_outcome(one, apps[one.app]) for one in probe.served]


def setting_of(levels: Sequence[float], one: Served) -> Setting:
    """Return a request's setting, with the widest levels that are not wider than its own."""
    prefill, decode = (int(np.argmax(np.asarray(levels) <= own + _ROUNDING)) for own in one.levels)
    return Setting(one.share, prefill, decode)


def _outcome(one: Served, app: AppScores) -> dict[str, Any]:
    found, row = app.by_setting[setting_of(app.levels, one)], app.row_of[one.question]
    choice = int(found.choice[row])
    return {
        "is_met": int(one.is_met),
        "agrees": int(one.is_met and choice == app.whole.choice[row]),
        "right": int(one.is_met and choice == app.right[row]),
        "nats": float(found.nats[row] - app.whole.nats[row]),
    }
