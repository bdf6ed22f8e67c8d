"""A planned request, from its plan to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llmaas_hooks import Levels, Request
from llmaas_plugins.deadlines.outcomes import AnswerReport
from llmaas_plugins.deadlines.phases import Question
from llmaas_plugins.deadlines.planner import Plan, begun, resumed_phase, worth_of

__all__ = ["Planned"]


@dataclass(slots=True)
class Planned:
    """Request that was planned and has not ended.

    Attributes:
        request: The request, with its whole prompt.
        model: Path of the model.
        question: Everything that the plan depends on.
        plan: Plan of the request.
        answer: Worth of the planned setting, and its risk.
        first_s: Time of the first token; None before.
        n_before: Number of tokens after the first at levels that the answer has left.
        before_s: Seconds that these tokens take by the tables.
    """

    request: Request
    model: str
    question: Question
    plan: Plan
    answer: AnswerReport
    first_s: float | None = None
    n_before: int = 0
    before_s: float = 0.0

    def begin(self, levels: Levels, n_read: int) -> None:
        """Give up what was decided otherwise: levels, or the number of tokens to read."""
        found = begun(self.question, self.plan, levels, n_read)
        if found != self.plan:  # the worth of another plugin's setting is unknown
            is_known = self.plan.at(levels) == self.plan
            worth = worth_of(self.question, found) if is_known else None
            self.answer = AnswerReport(worth, self.answer.max_risk)
        self.plan = found

    def resume(self, n_generated: int) -> None:
        """Plan the rest of the answer anew, after other requests used the engine."""
        phase = self.plan.tpot
        if phase is None or self.first_s is None:
            return
        passed_s = time.perf_counter() - self.first_s
        found = resumed_phase(self.question, self.plan, n_generated, passed_s)
        if found.level != phase.level:
            self.before_s += (n_generated - 1 - self.n_before) * phase.table_s
            self.n_before = n_generated - 1
            self.answer = AnswerReport(max_risk=self.answer.max_risk)  # of a mixture: unknown
        self.plan = self.plan._replace(tpot=found)

    def tpot_table_s(self, n_others: int) -> float:
        """Return the mean time by the tables of ``n_others`` tokens after the first."""
        assert self.plan.tpot is not None
        last_s = (n_others - self.n_before) * self.plan.tpot.table_s
        return (self.before_s + last_s) / n_others
