"""Choose the levels of a request from measured times (ElastiLM §3.1, Eq 1).

The paper scales one level by both limits. Here times are measured ones, and the prompt and the
answer have a level each. Cells of any level serve every level, so the two are chosen apart. A share
refers to a time that the whole model rarely exceeds, so that the whole model keeps 100 %.

The best answer that the limits allow is that of the widest levels, as the probability of the whole
model's answer rises with both levels. With a limit of the risk, the fastest policy is chosen among
those whose risk is certified and whose levels all keep the promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llmaas_hooks import Levels, LevelTimes, Promise, RequestCost
from llmaas_plugins.deadlines.correction import Fit
from llmaas_plugins.deadlines.policies import Policy

__all__ = ["Phase", "Plan", "Question", "answer_phase", "plan", "resumed_phase"]

_ROUNDING = 1e-9


class Phase(NamedTuple):
    """Plan of the prompt, or of the answer.

    Attributes:
        level: Level to use.
        limit_s: Promised time; None if there is none.
        table_s: Time by the tables alone, from the request's beginning.
        expected_s: Time to expect, with the time that the request waited.
        is_feasible: Whether the time is rarely longer than promised.
    """

    level: float
    limit_s: float | None
    table_s: float
    expected_s: float
    is_feasible: bool


class Plan(NamedTuple):
    """Plan of a request. A phase that is not planned, or has no measured times, is None.

    Attributes:
        ttft: Plan of the prompt.
        tpot: Plan of the answer.
        policy: Policy whose risk is certified; None if the plan is none.
    """

    ttft: Phase | None
    tpot: Phase | None
    policy: Policy | None = None

    @property
    def phases(self) -> tuple[Phase | None, Phase | None]:
        """Plans of the prompt and of the answer."""
        return self.ttft, self.tpot

    @property
    def levels(self) -> Levels:
        """Levels to use; None where nothing is planned."""
        return Levels(*(None if one is None else one.level for one in self.phases))

    def at(self, levels: Levels) -> Plan:
        """Return the plan without phases for which other levels were decided."""
        ttft = self.ttft if self.ttft and self.ttft.level == levels.prefill else None
        tpot = self.tpot if self.tpot and self.tpot.level == levels.decode else None
        return Plan(ttft, tpot, self.policy if ttft and tpot else None)


class Question(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        promise: Latency that is asked for.
        cost: Times that plugins predict.
        n_prompt: Number of prompt tokens.
        asked: Levels that the app itself sets.
        ttft: Correction of times to the first token.
        tpot: Correction of times of further tokens.
        policies: Policies whose risk is certified, if the risk is limited; else empty.
        n_answer: Number of tokens of an answer that count for the risk.
    """

    promise: Promise
    cost: RequestCost
    n_prompt: int
    asked: Levels = Levels()
    ttft: Fit = Fit()
    tpot: Fit = Fit()
    policies: tuple[Policy, ...] = ()
    n_answer: int = 1


def plan(question: Question) -> Plan:
    """Return the fastest certified levels that keep the promise, or else the widest ones.

    If none keep it, these are the fastest levels.
    """
    if not question.cost.levels:
        return Plan(None, None)
    ttft, tpot = _prompt_options(question), _answer_options(question)
    policy = _fastest(question, ttft, tpot)
    if policy is not None:
        return Plan(ttft.phase(policy.prefill), tpot.phase(max(policy.decode)), policy)
    return Plan(
        ttft.widest() if question.promise.ttft else None,
        tpot.widest() if question.promise.tpot else None,
    )


def answer_phase(question: Question, level: float) -> Phase:
    """Return the plan of the answer at another level that a policy of the plan has."""
    return _answer_options(question).phase(level)


def resumed_phase(question: Question, phase: Phase, n_generated: int, passed_s: float) -> Phase:
    """Return the plan of an answer that goes on after other requests used its engine.

    The level is narrower than before if the remaining tokens have to make up for lost time.

    Args:
        question: Everything that the plan depends on.
        phase: Plan of the answer so far.
        n_generated: Number of tokens that were sampled.
        passed_s: Seconds since the first of them.
    """
    options, n_left = _answer_options(question), question.promise.n_ahead(n_generated)
    if options.limit_s is None or not n_left:
        return phase
    n_all = n_generated - 1 + n_left
    left_s = n_all * options.limit_s - passed_s
    levels = [level for level in options.times if level <= phase.level]
    fitting = (level for level in levels if n_left * options.most_s(level) <= left_s)
    if (level := next(fitting, None)) is None:
        level = min(levels, key=options.times.__getitem__)
    table_s = options.times[level]
    return Phase(
        level,
        options.limit_s,
        table_s,
        expected_s=(passed_s + n_left * question.tpot.expected_s(table_s)) / n_all,
        is_feasible=n_left * options.most_s(level) <= left_s,
    )


# -- inside --------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """Levels that a phase may use, and their times.

    Attributes:
        times: Seconds by level, widest level first; only times that make sense.
        limit_s: Promised time; None if there is none.
        fit: Correction of the times.
        waited_s: Seconds that the request waited.
        room_s: Seconds that other requests leave; None if there are none.
    """

    times: dict[float, float]
    limit_s: float | None
    fit: Fit
    waited_s: float = 0.0
    room_s: float | None = None

    def most_s(self, level: float) -> float:
        """Return a time that a level rarely exceeds."""
        return self.fit.most_s(self.times[level])

    def fits(self, level: float) -> bool:
        """Return whether a level may be used and rarely takes longer than promised."""
        if level not in self.times:
            return False
        most_s = self.waited_s + self.most_s(level)
        return self.limit_s is None or most_s <= self.limit_s * (1 + _ROUNDING)

    def leaves_room(self, level: float) -> bool:
        """Return whether a level fits, and other requests keep their promises, too."""
        return self.fits(level) and (self.room_s is None or self.most_s(level) <= self.room_s)

    def phase(self, level: float) -> Phase:
        """Return the plan of a phase at a level."""
        table_s = self.times[level]
        expected_s = self.waited_s + self.fit.expected_s(table_s)
        return Phase(level, self.limit_s, table_s, expected_s, self.fits(level))

    def widest(self) -> Phase | None:
        """Return the plan at the widest level that leaves room, or else at the fastest one."""
        if not self.times or (self.limit_s is not None and not 0 < self.limit_s < math.inf):
            return None
        found = next(filter(self.leaves_room, self.times), None)
        return self.phase(min(self.times, key=self.times.__getitem__) if found is None else found)


def _prompt_options(question: Question) -> _Options:
    cost, promise = question.cost, question.promise
    n_evaluated = max(question.n_prompt - cost.n_ready, 1)
    whole_s = question.ttft.most_s(cost.levels[0].ttft_s(question.n_prompt))
    limit_s = promise.ttft and promise.ttft.seconds(whole_s)
    return _Options(
        _times(question.asked.prefill, lambda one: cost.ready_s + one.ttft_s(n_evaluated), cost),
        limit_s,
        question.ttft,
        promise.waited_s,
        _room(limit_s, promise, promise.room_s),
    )


def _answer_options(question: Question) -> _Options:
    promise, n_prompt = question.promise, question.n_prompt
    whole_s = question.tpot.most_s(question.cost.levels[0].tpot_s(n_prompt))
    limit_s = promise.tpot and promise.tpot.seconds(whole_s)
    return _Options(
        _times(question.asked.decode, lambda one: one.tpot_s(n_prompt), question.cost),
        limit_s,
        question.tpot,
        room_s=_room(limit_s, promise),
    )


def _room(limit_s: float | None, promise: Promise, room_s: float | None = None) -> float | None:
    """Return the seconds that other requests leave: those behind this one, and those to come."""
    if limit_s is None or not promise.pressure:
        return room_s
    found = (1 - promise.pressure) * limit_s
    return found if room_s is None else min(found, room_s)


def _times(
    asked: float | None, seconds: Callable[[LevelTimes], float], cost: RequestCost
) -> dict[float, float]:
    levels = _usable(cost.levels, asked)
    return {one.level: s for one in levels if 0 < (s := seconds(one)) < math.inf}


def _usable(levels: tuple[LevelTimes, ...], asked: float | None) -> tuple[LevelTimes, ...]:
    """Return the levels to choose from: the one that serves what the app asks for, or all."""
    if asked is None:
        return levels
    return next(((one,) for one in levels if one.level <= asked + _ROUNDING), levels[-1:])


def _fastest(question: Question, ttft: _Options, tpot: _Options) -> Policy | None:
    """Return the policy that takes the least time, if one keeps the promise."""

    def seconds(policy: Policy) -> float:
        token_s = sum(
            share * tpot.times[level]
            for share, level in zip(policy.shares, policy.decode, strict=True)
        )
        return ttft.times[policy.prefill] + (question.n_answer - 1) * token_s

    fit = [
        policy
        for policy in question.policies
        if ttft.fits(policy.prefill) and all(map(tpot.fits, set(policy.decode)))
    ]
    return min(fit, key=seconds, default=None)
