"""Hooks of the deadlines plugin: plan each request's levels, and compare times with promises."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

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
from llmaas_plugins.deadlines.outcomes import MOST_SHOWN, Outcomes, outcome
from llmaas_plugins.deadlines.planner import Plan, Question, plan
from llmaas_plugins.model.digest import Digest, begin_digest

__all__ = ["Deadlines"]

_NAME = "deadlines"
_WHOLE = Levels(1.0, 1.0)
_MOST_CORRECTIONS = 256

_log = logging.getLogger("llmaas.deadlines")


class _Planned(NamedTuple):
    """Request that was planned and has not ended."""

    request: Request
    model: str
    promise: Promise
    plan: Plan


class Deadlines:
    """Plugin that keeps promises of latency by choosing levels."""

    Config: ClassVar[type[DeadlinesConfig]] = DeadlinesConfig

    def __init__(self, config: DeadlinesConfig) -> None:
        """Take the configured promises."""
        self._config = config
        self._lock = forks.lock()
        self._planned: dict[int, _Planned] = {}
        self._corrections: OrderedDict[tuple[str, str | None, str], Correction] = OrderedDict()
        self._outcomes = Outcomes()
        self._told: set[str] = set()
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
        """Choose the widest levels that keep the request's promise."""
        promise = request.promise.over(self._config.promise_of(request.app))
        if not promise or _NAME in request.declined:
            return None
        costs, model = cost(), request.engine.llama.model_path
        with self._lock:
            question = Question(
                promise,
                costs,
                len(request.tokens),
                _WHOLE if "elastic" in request.declined else request.levels,
                self._correction(model, request.app, "ttft").fit(),
                self._correction(model, request.app, "tpot").fit(),
            )
            found = plan(question)
            self._planned[request.engine.ctx] = _Planned(request, model, promise, found)
            self._tell(model, found)
        return None if found.levels == Levels() else found.levels

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Give up what another plugin has decided."""
        with self._lock:
            planned = self._planned.get(request.engine.ctx)
            if planned is not None and planned.request is request:
                kept = planned.plan.at(levels or Levels())
                self._planned[request.engine.ctx] = planned._replace(plan=kept)

    @hookimpl
    def llmaas_request_end(self, request: Request, stats: RequestStats) -> None:
        """Compare the request's times with its promise and with the predictions."""
        with self._lock:
            planned = self._planned.get(request.engine.ctx)
            if planned is None or planned.request is not request:
                return
            del self._planned[request.engine.ctx]
            found = outcome(planned.promise, planned.plan, stats)
            if found.ttft_s is None:
                return  # it was ended before its first token
            self._outcomes.add(request.app, found)
            if request.notes is not None:
                request.notes[_NAME] = found.report()
            for name, phase, measured_s in found.phases:
                if phase is not None and measured_s is not None:
                    waited_s = planned.promise.waited_s if name == "ttft" else 0.0
                    correction = self._correction(planned.model, request.app, name)
                    correction.add(measured_s - waited_s, phase.table_s)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context, because another one may get its address."""
        with self._lock:
            self._planned.pop(ctx, None)

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

    def _correction(self, model: str, app: str | None, phase: str) -> Correction:
        """Return an app's correction: a grammar or a logits processor of another one is no cost."""
        key = model, app, phase
        found = self._corrections.setdefault(key, Correction())
        self._corrections.move_to_end(key)
        while len(self._corrections) > _MOST_CORRECTIONS:
            self._corrections.popitem(last=False)
        return found

    def _tell(self, model: str, found: Plan) -> None:
        """Log once that a model has no times."""
        if found == Plan(None, None) and model not in self._told:
            self._told.add(model)
            _log.warning(
                "requests to %s have promises, but no times were measured, so nothing is planned. "
                "Promises need a prepared model, the plugin elastic, and "
                "`llmaas elastic profile %s`. A large model is first identified, for some seconds "
                "after it was loaded.", model, model,
            )  # fmt: skip
