"""Choose the widest levels whose predicted times keep a promise (ElastiLM §3.1, Eq 1).

The paper scales one level by both limits. Here times are measured ones, and the prompt and the
answer have a level each. Cells of any level serve every level, so the two are chosen apart. A share
refers to a time that the whole model rarely exceeds, so that the whole model keeps 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llmaas_hooks import Levels, LevelTimes, Promise, RequestCost
from llmaas_plugins.deadlines.correction import Fit

__all__ = ["Phase", "Plan", "Question", "plan"]

_ROUNDING = 1e-9


class Phase(NamedTuple):
    """Plan of the prompt, or of the answer.

    Attributes:
        level: Level to use.
        limit_s: Promised time.
        table_s: Time by the tables alone, from the request's beginning.
        expected_s: Time to expect, with the time that the request waited.
        is_feasible: Whether the time is rarely longer than promised.
    """

    level: float
    limit_s: float
    table_s: float
    expected_s: float
    is_feasible: bool


class Plan(NamedTuple):
    """Plan of a request. A phase without a promise, or without measured times, is None."""

    ttft: Phase | None
    tpot: Phase | None

    @property
    def levels(self) -> Levels:
        """Levels to use; None where nothing is promised."""
        return Levels(*(None if one is None else one.level for one in self))

    def at(self, levels: Levels) -> Plan:
        """Return the plan without phases for which other levels were decided."""
        ttft = self.ttft if self.ttft and self.ttft.level == levels.prefill else None
        return Plan(ttft, self.tpot if self.tpot and self.tpot.level == levels.decode else None)


class Question(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        promise: Latency that is asked for.
        cost: Times that plugins predict.
        n_prompt: Number of prompt tokens.
        asked: Levels that the app itself sets.
        ttft: Correction of times to the first token.
        tpot: Correction of times of further tokens.
    """

    promise: Promise
    cost: RequestCost
    n_prompt: int
    asked: Levels = Levels()
    ttft: Fit = Fit()
    tpot: Fit = Fit()


def plan(question: Question) -> Plan:
    """Return the widest levels that keep the promise, or the fastest ones if none does."""
    cost, n_prompt, promise = question.cost, question.n_prompt, question.promise
    if not cost.levels:
        return Plan(None, None)
    n_evaluated = max(n_prompt - cost.n_ready, 1)

    def ttft_s(times: LevelTimes) -> float:
        return cost.ready_s + times.ttft_s(n_evaluated)

    def tpot_s(times: LevelTimes) -> float:
        return times.tpot_s(n_prompt)

    whole = cost.levels[0]
    ttft = tpot = None
    if promise.ttft is not None:
        limit_s = promise.ttft.seconds(question.ttft.most_s(whole.ttft_s(n_prompt)))
        levels = _usable(cost.levels, question.asked.prefill)
        ttft = _widest(levels, ttft_s, limit_s, question.ttft, promise.waited_s)
    if promise.tpot is not None:
        limit_s = promise.tpot.seconds(question.tpot.most_s(tpot_s(whole)))
        levels = _usable(cost.levels, question.asked.decode)
        tpot = _widest(levels, tpot_s, limit_s, question.tpot)
    return Plan(ttft, tpot)


# -- inside --------------------------------------------------------------------------------------


def _usable(levels: tuple[LevelTimes, ...], asked: float | None) -> tuple[LevelTimes, ...]:
    """Return the levels to choose from: the one that serves what the app asks for, or all."""
    if asked is None:
        return levels
    return next(((one,) for one in levels if one.level <= asked + _ROUNDING), levels[-1:])


def _widest(
    levels: tuple[LevelTimes, ...],
    seconds: Callable[[LevelTimes], float],
    limit_s: float,
    fit: Fit,
    waited_s: float = 0.0,
) -> Phase | None:
    """Return the plan of a phase, or None if no time makes sense."""
    times = [(one.level, s) for one in levels if 0 < (s := seconds(one)) < math.inf]
    if not times or not 0 < limit_s < math.inf:
        return None
    limit = limit_s * (1 + _ROUNDING)
    found = next((one for one in times if waited_s + fit.most_s(one[1]) <= limit), None)
    level, table_s = found or min(times, key=lambda one: one[1])
    return Phase(level, limit_s, table_s, waited_s + fit.expected_s(table_s), found is not None)
