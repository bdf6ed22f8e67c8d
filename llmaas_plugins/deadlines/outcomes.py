"""Outcomes of promises: counts, histograms, and each app's last request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmaas_hooks import Promise, RequestStats
from llmaas_plugins.deadlines.phases import Phase, Question, limits_of
from llmaas_plugins.deadlines.planner import Plan

__all__ = ["MOST_SHOWN", "AnswerReport", "Outcome", "Outcomes", "outcome"]

_BOUNDS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Upper bounds of the histograms' buckets: measured over promised time."""
_MOST_APPS = 64
MOST_SHOWN = 128
"""Most characters of an app's name in reports."""


class AnswerReport(NamedTuple):
    """Worth of the setting that a request was served with.

    Attributes:
        worth: Estimated probability of the whole model's answer; None if it is unknown.
        max_risk: Largest risk that the app accepts; None if it sets none.
        margin: Margin of the first token, if it decided the answer's level.
        is_certified: Whether the risk is certified.
    """

    worth: float | None = None
    max_risk: float | None = None
    margin: float | None = None
    is_certified: bool = False

    @property
    def is_best_effort(self) -> bool:
        """Whether the app sets a risk that is not certified."""
        return self.max_risk is not None and not self.is_certified


class Outcome(NamedTuple):
    """Times of one request.

    Attributes:
        promise: Latency that was asked for.
        plan: Plan of the request.
        answer: Worth of the setting, and its risk.
        ttft_s: Measured time to the first token, with the time that the request waited; if there
            was none, the time until the request's end.
        tpot_s: Measured mean time of each further token, with one that did not come if that makes
            it later than promised; None if there was none.
        n_prompt: Number of tokens of the whole prompt.
        limits_s: Promised seconds by phase; None where nothing is promised, or is known.
    """

    promise: Promise
    plan: Plan
    answer: AnswerReport
    ttft_s: float
    tpot_s: float | None
    n_prompt: int
    limits_s: Mapping[str, float | None]

    @property
    def phases(self) -> tuple[tuple[str, Phase | None, float | None], ...]:
        """Name, plan and measured time of both phases."""
        return (
            ("ttft", self.plan.ttft, self.ttft_s),
            ("tpot", self.plan.tpot, self.tpot_s),
        )

    @property
    def over_promise(self) -> dict[str, float]:
        """Measured time over the promised one by phase, of phases of which both are known."""
        return {
            name: measured_s / limit_s
            for name, _, measured_s in self.phases
            if measured_s is not None and (limit_s := self.limits_s[name])
        }

    @property
    def misses(self) -> list[str]:
        """Phases that took longer than promised, whether they were planned or not."""
        return [name for name, ratio in self.over_promise.items() if ratio > 1]

    @property
    def infeasible(self) -> list[str]:
        """Phases of which the plan said that they may take longer than promised."""
        return [name for name, phase, _ in self.phases if phase and not phase.is_feasible]

    @property
    def is_shortened(self) -> bool:
        """Whether the request read a part of its prompt."""
        return self.plan.reading is not None and not self.plan.reading.is_whole

    def report(self) -> dict[str, Any]:
        """Return promised, expected and measured times in ms, as JSON types."""
        found: dict[str, Any] = {"missed": self.misses, "infeasible": self.infeasible}
        found |= self._answer_report() | self._prompt_report()
        for name, phase, measured_s in self.phases:
            limit = getattr(self.promise, name)
            if limit is None and phase is None:
                found[name] = None
                continue
            found[name] = {
                "promised": limit and str(limit),
                "promised_ms": _ms(self.limits_s[name]),
                "expected_ms": phase and _ms(phase.expected_s),
                "measured_ms": _ms(measured_s),
                "level": phase and phase.level,
            }
        return found

    def _answer_report(self) -> dict[str, Any]:
        answer, policy = self.answer, self.plan.policy
        found: dict[str, Any] = {"worth": None if answer.worth is None else round(answer.worth, 4)}
        if answer.max_risk is None:
            return found
        risk = policy.risk if policy is not None and answer.is_certified else None
        return found | {
            "max_risk": answer.max_risk,
            "certified_risk": None if risk is None else round(risk, 4),
            "margin": None if answer.margin is None else round(answer.margin, 4),
        }

    def _prompt_report(self) -> dict[str, Any]:
        """Return how much of the prompt was read, if the request had a choice."""
        reading = self.plan.reading
        if reading is None:
            return {}
        found = {
            "share": round(reading.share, 4),
            "left_out": self.n_prompt - reading.n_tokens,
            "choosing_ms": _ms(reading.before_s) if self.is_shortened else 0.0,
        }
        return {"prompt": found}


def outcome(question: Question, plan: Plan, answer: AnswerReport, stats: RequestStats) -> Outcome:
    """Return the outcome of a request that ended."""
    promise, limits_s = question.promise, limits_of(question)
    first_s = stats.total_s if stats.first_token_s is None else stats.first_token_s
    tpot_s = _tpot_s(stats, limits_s["tpot"])
    ttft_s = promise.waited_s + first_s
    return Outcome(promise, plan, answer, ttft_s, tpot_s, question.n_prompt, limits_s)


class Outcomes:
    """Counts of all requests with a promise since the plugin was activated."""

    def __init__(self) -> None:
        """Start with zeros."""
        names = (
            *("promised", "met", "missed", "infeasible", "unexpected", "unplanned"),
            *("risk_limited", "best_effort", "shortened"),
        )
        self._counts = dict.fromkeys(names, 0)
        self._histograms = {
            name: dict.fromkeys((*map(str, _BOUNDS), "inf"), 0) for name in ("ttft", "tpot")
        }
        self._last: OrderedDict[str, Outcome] = OrderedDict()

    def add(self, app: str | None, found: Outcome) -> None:
        """Count a request that gave a token, or came too late for one."""
        counts = self._counts
        counts["risk_limited"] += found.answer.max_risk is not None
        counts["best_effort"] += found.answer.is_best_effort
        counts["promised"] += bool(found.promise)
        counts["shortened"] += found.is_shortened
        counts["unplanned"] += bool(found.promise) and found.plan.is_empty
        if found.promise and (found.over_promise or not found.plan.is_empty):
            counts["missed" if found.misses else "met"] += 1
            counts["infeasible"] += bool(found.infeasible)
            counts["unexpected"] += not set(found.misses) <= set(found.infeasible)
        for phase, ratio in found.over_promise.items():
            self._bucket(self._histograms[phase], ratio)
        name = (app or "")[:MOST_SHOWN]
        self._last[name] = found
        self._last.move_to_end(name)
        while len(self._last) > _MOST_APPS:
            self._last.popitem(last=False)

    def report(self) -> dict[str, Any]:
        """Return counts, cumulative histograms, and the last request of each recent app."""
        return {
            "requests": dict(self._counts),
            "ttft_over_promise": dict(self._histograms["ttft"]),
            "tpot_over_promise": dict(self._histograms["tpot"]),
            "last": {app: found.report() for app, found in self._last.items()},
        }

    @staticmethod
    def _bucket(histogram: dict[str, int], ratio: float) -> None:
        """Count a ratio in each bucket whose bound it does not exceed, as Prometheus does."""
        for bound in _BOUNDS:
            histogram[str(bound)] += ratio <= bound
        histogram["inf"] += 1


def _tpot_s(stats: RequestStats, limit_s: float | None) -> float | None:
    """Return the mean time of the tokens after the first.

    One that did not come counts if the mean is later than promised with it, and no earlier than
    without it. Otherwise the request ended before it was late.
    """
    n_others = stats.n_generated - 1
    mean_s = stats.decode_s / n_others if n_others > 0 else None
    if limit_s is None or n_others < 0:
        return mean_s
    with_it_s = (stats.decode_s + stats.pending_s) / (n_others + 1)
    return with_it_s if with_it_s > max(limit_s, mean_s or 0.0) else mean_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
