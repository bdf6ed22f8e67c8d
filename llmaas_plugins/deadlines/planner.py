"""Choose the widest levels whose predicted times keep a promise (ElastiLM §3.1, Eq 1).

The paper scales one level by both limits. Here times are measured ones, and the prompt and the
answer have a level each. Cells of any level serve every level, so the two are chosen apart. A share
refers to a time that the whole model rarely exceeds, so that the whole model keeps 100 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmaas_hooks import Levels, LevelTimes, Promise, RequestCost
from llmaas_plugins.deadlines.correction import Factor

__all__ = ["Phase", "Plan", "Question", "plan"]

_ROUNDING = 1e-9


class Phase(NamedTuple):
    """Plan of the prompt, or of the answer.

    Attributes:
        level: Level to use.
        limit_s: Promised time.
        table_s: Time by the tables alone, without a factor, from the request's beginning.
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
    ttft: Factor = Factor()
    tpot: Factor = Factor()


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
        limit_s = promise.ttft.seconds(question.ttft.high * whole.ttft_s(n_prompt))
        levels = _usable(cost.levels, question.asked.prefill)
        ttft = _widest(levels, ttft_s, limit_s, question.ttft, promise.waited_s)
    if promise.tpot is not None:
        limit_s = promise.tpot.seconds(question.tpot.high * tpot_s(whole))
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
    factor: Factor,
    waited_s: float = 0.0,
) -> Phase:
    times = [(one.level, seconds(one)) for one in levels]
    most_s = limit_s * (1 + _ROUNDING)
    fitting = ((level, s) for level, s in times if waited_s + s * factor.high <= most_s)
    found = next(fitting, None)
    level, table_s = found or min(times, key=lambda one: one[1])
    expected_s = waited_s + table_s * factor.middle
    return Phase(level, limit_s, table_s, expected_s, found is not None)
