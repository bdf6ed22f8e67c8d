"""Hooks of the deadlines plugin: plan each request's prompt and levels, and judge its times."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import (
    Levels,
    ModelLoad,
    NativeContext,
    Promise,
    Request,
    RequestCost,
    RequestStats,
    forks,
    hookimpl,
)
from llmaas_plugins.deadlines.config import DeadlinesConfig
from llmaas_plugins.deadlines.correction import Correction
from llmaas_plugins.deadlines.learned import Lessons
from llmaas_plugins.deadlines.margin import first_two
from llmaas_plugins.deadlines.outcomes import MOST_SHOWN, AnswerReport, Outcomes, outcome
from llmaas_plugins.deadlines.phases import Question
from llmaas_plugins.deadlines.planned import Planned
from llmaas_plugins.deadlines.planner import Plan, answer_phase, plan, worth_of
from llmaas_plugins.deadlines.policies import Policy
from llmaas_plugins.model.digest import Digest, begin_digest

__all__ = ["Deadlines"]

_NAME = "deadlines"
_WHOLE = Levels(1.0, 1.0)
_MOST_CORRECTIONS = 256

_log = logging.getLogger("llmaas.deadlines")


class Deadlines:
    """Plugin that keeps promises of latency by choosing levels and shorter prompts."""

    Config: ClassVar[type[DeadlinesConfig]] = DeadlinesConfig

    def __init__(self, config: DeadlinesConfig) -> None:
        """Take the configured promises."""
        self._config = config
        self._lock = forks.lock()
        self._planned: dict[int, Planned] = {}  # by _key: some requests are interrupted
        self._corrections: OrderedDict[tuple[str, str | None, str], Correction] = OrderedDict()
        self._outcomes = Outcomes()
        self._told: set[tuple[str, str]] = set()
        self._lessons = Lessons()
        self._digests: weakref.WeakKeyDictionary[ModelLoad, Digest] = weakref.WeakKeyDictionary()

    def promise_of(self, app: str | None) -> Promise:
        """Return the latency that the configuration promises to an app's requests."""
        return self._config.promise_of(app)

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Begin to identify the model, as its times are kept by the file's digest."""
        load = context.load
        if load is not None and load.files and load not in self._digests:
            self._digests[load] = begin_digest(load.files)

    @hookimpl
    def llmaas_level(self, request: Request, cost: Callable[[], RequestCost]) -> Levels | None:
        """Choose the levels, and the share of the prompt, that keep the request's promise."""
        config, app = self._config, request.app
        promise, risk = request.promise.over(config.promise_of(app)), config.risk_of(app)
        if not (promise or risk) or _NAME in request.declined:
            return None
        costs, model = cost(), request.engine.llama.model_path
        n_answer = config.n_answer_of(app)
        learned = self._lessons.about(costs.levels_id, app, n_answer, risk)
        with self._lock:
            question = Question(
                promise,
                costs,
                len(request.tokens),
                _asked(request),
                self._correction(model, app, "ttft").fit(),
                self._correction(model, app, "tpot").fit(),
                () if risk is None else learned.policies,
                n_answer,
                learned.worth and learned.worth.known_of(costs.shorter_by),
            )
            found = plan(question)
            answer = AnswerReport(
                worth_of(question, found),
                None if risk is None else risk.most,
                is_certified=found.policy is not None,
            )
            self._planned[_key(request)] = Planned(request, model, question, found, answer)
            self._tell(model, question, found, answer)
        return None if found.levels == Levels() else self._with_choices(request, found)

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Give up what another plugin has decided."""
        with self._lock:
            planned = self._planned.get(_key(request))
            if planned is not None:
                planned.begin(levels or Levels(), len(request.tokens))

    @hookimpl
    def llmaas_request_end(self, request: Request, stats: RequestStats) -> None:
        """Compare the request's times with its promise and with the predictions."""
        with self._lock:
            planned = self._planned.pop(_key(request), None)
            if planned is None:
                return
            found = outcome(planned.question, planned.plan, planned.answer, stats)
            has_token = stats.first_token_s is not None
            if not (has_token or found.misses):
                return  # it was ended in time
            self._outcomes.add(request.app, found)
            if request.notes is not None:
                request.notes[_NAME] = found.report()
            if has_token:
                self._correct(planned, stats)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context, because another one may get its address."""
        with self._lock:
            for key, planned in list(self._planned.items()):
                if planned.request.engine.ctx == ctx:
                    del self._planned[key]

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return counts, histograms, corrections, and each app's last request."""
        with self._lock:
            return {
                **self._outcomes.report(),
                "corrections": {
                    ": ".join((model, *([app[:MOST_SHOWN]] if app else []), name)): {
                        "offset_ms": round(1000 * correction.fit().offset_s, 3),
                        "slope": round(correction.fit().slope, 4),
                    }
                    for (model, app, name), correction in self._corrections.items()
                    if correction
                },
            }

    # -- inside ---------------------------------------------------------------------------------

    def _correct(self, planned: Planned, stats: RequestStats) -> None:
        """Learn from the times of a request's tokens, without those of others on the engine."""
        found, n_others = planned.plan, stats.n_generated - 1
        times = []
        if found.ttft is not None and stats.first_token_s is not None:
            times.append(("ttft", stats.first_token_s, stats.first_away_s, found.ttft.table_s))
        if found.tpot is not None and n_others > 0:
            mean_s, away_s = stats.decode_s / n_others, stats.decode_away_s / n_others
            times.append(("tpot", mean_s, away_s, planned.tpot_table_s(n_others)))
        for name, seconds, away_s, table_s in times:
            correction = self._correction(planned.model, planned.request.app, name)
            correction.add(seconds - away_s, table_s, is_alone=not away_s)

    def _with_choices(self, request: Request, found: Plan) -> Levels:
        """Return a plan's levels, of which the answer's may be chosen later.

        A certified policy chooses by the first token, and keeps that level after interruptions.
        """
        policy = found.policy
        if policy is not None:
            if len(set(policy.decode)) == 1:
                return found.levels
            choose = functools.partial(self._choose, request, policy)
            return replace(found.levels, at_first_token=choose)
        if found.tpot is None:
            return found.levels
        level = found.tpot.level
        return replace(
            found.levels,
            at_first_token=lambda _logits: self._begin_answer(request, level),
            at_resume=lambda n_generated: self._go_on(request, level, n_generated),
        )

    def _choose(self, request: Request, policy: Policy, logits: NDArray[np.float32]) -> float:
        """Choose the level of an answer by the margin of its first token."""
        _, margin = first_two(logits)
        i = policy.range_of(margin)
        with self._lock:
            planned = self._planned.get(_key(request))
            if planned is None or planned.plan.policy is not policy:
                return max(policy.decode)  # another plugin chose the prompt's level
            tpot = answer_phase(planned.question, policy.decode[i])
            planned.plan = planned.plan._replace(tpot=tpot)
            planned.answer = planned.answer._replace(worth=policy.worth[i], margin=margin)
        return policy.decode[i]

    def _begin_answer(self, request: Request, level: float) -> float:
        """Keep the time of an answer's first token."""
        with self._lock:
            if (planned := self._planned.get(_key(request))) is not None:
                planned.first_s = time.perf_counter()
        return level

    def _go_on(self, request: Request, level: float, n_generated: int) -> float:
        """Choose the level of an answer that goes on after other requests used its engine."""
        with self._lock:
            planned = self._planned.get(_key(request))
            if planned is None or planned.plan.tpot is None:
                return level
            planned.resume(n_generated)
            return planned.plan.tpot.level

    def _correction(self, model: str, app: str | None, phase: str) -> Correction:
        """Return an app's correction: a grammar or a logits processor of another one is no cost."""
        key = model, app, phase
        found = self._corrections.setdefault(key, Correction())
        self._corrections.move_to_end(key)
        while len(self._corrections) > _MOST_CORRECTIONS:
            self._corrections.popitem(last=False)
        return found

    def _tell(self, model: str, question: Question, found: Plan, answer: AnswerReport) -> None:
        """Log once that a model has no times, and once that a risk cannot be certified."""
        if found.is_empty and (question.promise or not question.cost.levels):
            if (model, "times") in self._told:
                return
            self._told.add((model, "times"))
            _log.warning(
                "requests to %s have promises, but no times were measured, so nothing is planned. "
                "Promises need a prepared model, the plugin elastic, and "
                "`llmaas elastic profile %s`. A large model is first identified, for some seconds "
                "after it was loaded.", model, model,
            )  # fmt: skip
        elif answer.is_best_effort and (model, "risk") not in self._told:
            self._told.add((model, "risk"))
            _log.warning(
                "answers of %s may differ from the whole model's more often than max_risk = %s: no "
                "certified setting keeps the promises. `llmaas deadlines learn %s` measures "
                "answers, with --app and --prompts those of one app; more requests certify more.",
                model, answer.max_risk, model,
            )  # fmt: skip


def _key(request: Request) -> int:
    """Return the same number for a request before and after its prompt was shortened."""
    return id(request.whole or request)


def _asked(request: Request) -> Levels:
    """Return what the app itself sets; without elastic, its levels are those of the whole model."""
    asked = request.levels
    return (
        replace(_WHOLE, prompt_share=asked.prompt_share) if "elastic" in request.declined else asked
    )
