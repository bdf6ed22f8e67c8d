"""Choose a request's prompt share and levels from measured times (ElastiLM §3.1, Eq 1, and §3.3).

The paper scales one level by both limits. Here times are measured ones, and the prompt and the
answer have a level each. Cells of any level serve every level, so the two are chosen apart. A share
of time refers to a time that the whole model rarely exceeds, so that the whole model keeps 100 %.

The best answer to a prompt that the limits allow is that of the widest levels, as the probability
of the whole model's answer rises with both levels. If the request could read a shorter prompt, each
prompt is planned so, and the plans are compared:

- Among plans that keep the promise, the one whose answer is most probably the whole model's is
  used. As long as these probabilities are unknown, it is the one with the longest prompt.
- If none keeps the promise, the nearest one is used, and flagged.

With a limit of the risk, the prompt stays whole, and the fastest policy is chosen among those whose
risk is certified and whose levels all keep the promise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from llmaas_hooks import Levels, Promise
from llmaas_plugins.deadlines.phases import (
    Phase,
    Question,
    Reading,
    answer_options,
    prompt_options,
)
from llmaas_plugins.deadlines.policies import Policy

__all__ = ["Plan", "answer_phase", "begun", "plan", "resumed_phase", "worth_of"]

_WHOLE = Levels(1.0, 1.0)
_NEAR = 0.05
"""Share by which a plan may be farther from the promise than the nearest one, if it reads more."""


class Plan(NamedTuple):
    """Plan of a request. A phase that is not planned, or has no measured times, is None.

    Attributes:
        ttft: Plan of the prompt.
        tpot: Plan of the answer.
        policy: Policy whose risk is certified; None if the plan is none.
        reading: Prompt that the request reads; None if it had no choice.
    """

    ttft: Phase | None
    tpot: Phase | None
    policy: Policy | None = None
    reading: Reading | None = None

    @property
    def phases(self) -> tuple[Phase | None, Phase | None]:
        """Plans of the prompt and of the answer."""
        return self.ttft, self.tpot

    @property
    def is_empty(self) -> bool:
        """Whether nothing is planned, as there are no measured times."""
        return self.phases == (None, None)

    @property
    def levels(self) -> Levels:
        """Levels to use, and share of the prompt; None where nothing is planned."""
        prefill, decode = (None if one is None else one.level for one in self.phases)
        return Levels(prefill, decode, prompt_share=self.reading and self.reading.share)

    def keeps(self, promise: Promise) -> bool:
        """Return whether each promised time is rarely exceeded."""
        return all(phase is not None and phase.is_feasible for phase in self._promised(promise))

    def excess(self, promise: Promise) -> float:
        """Return the expected time over the promised one, of the phase that exceeds it most."""
        return max(
            phase.expected_s / phase.limit_s if phase and phase.limit_s else math.inf
            for phase in self._promised(promise)
        )

    def at(self, levels: Levels) -> Plan:
        """Return the plan without phases for which other levels were decided."""
        ttft = self.ttft if self.ttft and self.ttft.level == levels.prefill else None
        tpot = self.tpot if self.tpot and self.tpot.level == levels.decode else None
        return Plan(ttft, tpot, self.policy if ttft and tpot else None, self.reading)

    def _promised(self, promise: Promise) -> list[Phase | None]:
        limits = promise.ttft, promise.tpot
        return [phase for limit, phase in zip(limits, self.phases, strict=True) if limit]


def plan(question: Question) -> Plan:
    """Return the fastest certified levels that keep the promise, or else the best plan.

    That is the plan of the largest worth among those that keep the promise. If none keeps it, it is
    the one with the longest prompt among those that are nearest to it. ElastiLM's check at run time
    (§3.3) takes a random setting where a decision would miss the promise; this is the same made
    deterministic.
    """
    if not question.cost.levels:
        return Plan(None, None)
    if (found := _fastest(question)) is not None:
        return found
    promise, plans = question.promise, list[Plan]()
    for reading in question.readings:
        plans.append(found := _widest(question, reading))
        if found.keeps(promise) and (question.worth is None or worth_of(question, found) == 1):
            return found  # no shorter prompt is worth more
    if keeping := [one for one in plans if one.keeps(promise)]:
        return max(keeping, key=lambda one: worth_of(question, one) or 0.0)  # the first of equals
    least = min(one.excess(promise) for one in plans)
    return next(one for one in plans if one.excess(promise) <= (1 + _NEAR) * least)


def begun(question: Question, found: Plan, levels: Levels, n_read: int) -> Plan:
    """Return the plan of a request whose levels and prompt were decided.

    Phases for which other levels were decided are given up. If the prompt was not shortened as
    planned, times are those of the tokens that are read.

    Args:
        question: Everything that the plan depends on.
        found: The plan.
        levels: Levels that were decided.
        n_read: Number of prompt tokens that the request reads.
    """
    kept, share = found.at(levels), question.asked.over(levels).prompt_share
    reading = question.reading_of(n_read, share)
    if reading == (found.reading or question.whole):
        return kept
    if kept.is_empty:
        return Plan(None, None, None, reading)
    return Plan(
        prompt_options(question, reading).same(kept.ttft),
        answer_options(question, reading).same(kept.tpot),
        None,  # its certificate is for whole prompts
        reading,
    )


def worth_of(question: Question, found: Plan) -> float | None:
    """Return the probability of the whole model's answer; None if it is unknown.

    A level that is not planned is 1.0.
    """
    if question.worth is None:
        return None
    levels = found.levels.over(_WHOLE)
    assert levels.prefill is not None
    assert levels.decode is not None
    share = 1.0 if levels.prompt_share is None else levels.prompt_share
    return question.worth.at(levels.prefill, levels.decode, question.n_prompt, share)


def answer_phase(question: Question, level: float) -> Phase:
    """Return the plan of the answer at another level that a policy of the plan has."""
    return answer_options(question, question.whole).phase(level)


def resumed_phase(question: Question, found: Plan, n_generated: int, passed_s: float) -> Phase:
    """Return the plan of an answer that goes on after other requests used its engine.

    The level is narrower than before if the remaining tokens have to make up for lost time.

    Args:
        question: Everything that the plan depends on.
        found: Plan of the request so far, with an answer.
        n_generated: Number of tokens that were sampled.
        passed_s: Seconds since the first of them.
    """
    phase = found.tpot
    assert phase is not None
    options = answer_options(question, found.reading or question.whole)
    n_left = question.promise.n_ahead(n_generated)
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


def _widest(question: Question, reading: Reading) -> Plan:
    """Return the plan with the widest levels for a prompt."""
    promise, chosen = question.promise, reading if question.cost.shorter else None
    return Plan(
        prompt_options(question, reading).widest() if promise.ttft else None,
        answer_options(question, reading).widest() if promise.tpot else None,
        None,
        chosen,
    )


def _fastest(question: Question) -> Plan | None:
    """Return the plan of the policy that takes the least time, if one keeps the promise."""
    (reading, *_) = question.readings
    if not (question.policies and reading.is_whole):
        return None
    ttft, tpot = prompt_options(question, reading), answer_options(question, reading)

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
    if not fit:
        return None
    policy = min(fit, key=seconds)
    chosen = reading if question.cost.shorter else None
    return Plan(ttft.phase(policy.prefill), tpot.phase(max(policy.decode)), policy, chosen)
