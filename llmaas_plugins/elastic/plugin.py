"""Hooks of the elastic plugin: choose each request's level and narrow prepared models to it."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from llmaas_hooks import (
    ConfigError,
    DecodeStep,
    Drafter,
    FileStamp,
    Guess,
    Levels,
    LogitsView,
    MemoryClaim,
    ModelLoad,
    NativeContext,
    Request,
    RequestCost,
    RequestScope,
    WeightClaim,
    forks,
    hookimpl,
)
from llmaas_plugins.elastic.adapters import read_adapters
from llmaas_plugins.elastic.config import ElasticConfig
from llmaas_plugins.elastic.contexts import Course, ElasticContext, ElasticModel
from llmaas_plugins.elastic.drafting import LevelDrafter
from llmaas_plugins.elastic.level_drafts import LevelDrafts
from llmaas_plugins.elastic.level_identity import levels_id, levels_key
from llmaas_plugins.elastic.level_times import ModelTimes, level_times
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.parts import LevelAdapters, part_claims

__all__ = ["ElasticModels"]

_log = logging.getLogger("llmaas.elastic")

_WHOLE = Levels(1.0, 1.0)
_NO_CONTEXT = (
    "the context has no levels; it was created before `activate`, or the engine lacks the hook "
    "point (`llmaas doctor` says which)"
)


_Key = tuple[str, FileStamp | None]
"""Path and stamp of a model's file. A path alone may name another file later, or elsewhere."""


def _key(load: ModelLoad) -> _Key:
    return load.path, load.files[0].stamp if load.files else None


class ElasticModels:
    """Plugin that narrows prepared models to the level of each request."""

    Config: ClassVar[type[ElasticConfig]] = ElasticConfig

    def __init__(self, config: ElasticConfig) -> None:
        """Take the configured levels; models and contexts are added by the hooks."""
        self._config = config
        self._configured = Levels(config.prefill_level, config.decode_level).over(
            Levels(config.level, config.level)
        )
        self._lock = forks.lock()
        self._models: dict[_Key, ElasticModel] = {}
        self._contexts: dict[int, ElasticContext] = {}
        self._courses: dict[int, Course] = {}  # by the request's id
        self._chosen: dict[int, float] = {}  # levels at the first token, by the request's id
        self._drafts: dict[int, LevelDrafts] = {}  # by the model's address
        self._left_alone: dict[str, str] = {}
        self._adapted: set[str] = set()
        self._times: weakref.WeakKeyDictionary[ModelLoad, ModelTimes] = weakref.WeakKeyDictionary()
        self._n_switches = 0
        self._n_tokens: Counter[float] = Counter()

    def problem(self) -> str | None:
        """Return why no open context has levels, or None if one has."""
        with self._lock:
            if self._contexts:
                return None
            return next(iter(self._left_alone.values()), _NO_CONTEXT)

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl(tryfirst=True)  # before a plugin measures the memory that is in use
    def llmaas_weights(self, load: ModelLoad) -> list[WeightClaim]:
        """Claim the elastic weights of a prepared model."""
        self._models.pop(_key(load), None)  # the file may have been loaded with other settings
        found = read_elastic(Path(load.path))
        if found is None:
            reason = (
                f"{load.path} has no levels, so the whole model is used; "
                f"`llmaas elastic prepare {load.path}` writes a file that has levels"
            )
            self._leave_alone(load.path, reason)
            return []
        self._left_alone.pop(load.path, None)
        table = self._table(found, load.path)
        widths = found.tables[table]
        biases = found.biases_of(table) if self._config.compensate else {}
        for by_level in biases.values():
            by_level[0] = 0  # the whole model leaves nothing out
        adapters: LevelAdapters = {}
        if self._config.adapters:
            adapters = read_adapters(Path(load.path), found, table)
        self._models[_key(load)] = ElasticModel(
            name=Path(load.path).name,
            levels=found.levels,
            table=table,
            widths=widths,
            cuts_keys_values=found.blocks.cuts_keys_values,
            is_compensated=bool(biases),
            adapters=found.adapters.get(table),
            is_adapted=bool(adapters),
            levels_key=levels_key(
                found.levels, widths, biases, found.adapters.get(table) if adapters else None
            ),
        )
        return part_claims(found.blocks, widths, biases, adapters)

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Track the new context if its model has levels."""
        model = None if context.load is None else self._models.get(_key(context.load))
        if context.load is None or model is None:
            return
        if not context.has_claims:
            path = context.load.path
            self._leave_alone(
                path, f"{path} cannot be narrowed, so the whole model is used; the log tells why"
            )
            return
        with self._lock:
            self._contexts[context.ctx] = ElasticContext(context, model)
            self._rest(self._contexts[context.ctx], Levels())

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Stop tracking a context."""
        with self._lock:
            context = self._contexts.pop(ctx, None)
            models = {one.native.model for one in self._contexts.values()}
            if context is not None and context.native.model not in models:
                self._drafts.pop(context.native.model, None)

    @hookimpl
    def llmaas_cost(self, request: Request) -> RequestCost | None:
        """Return the times of each level that `llmaas elastic profile` measured."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
        load = request.engine.load
        if context is None or load is None:
            return None
        if load not in self._times:
            self._times[load] = ModelTimes(load, context.model.table)
        times = self._times[load]
        latency = times.latency()
        if latency is None or times.digest is None:
            return None
        return RequestCost(
            levels=level_times(latency, request.engine.ctx),
            levels_id=levels_id(times.digest, context.model.levels_key),
        )

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Set the level of the request's prompt."""
        asks = request.levels
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            if context is None:
                if asks.are_named:
                    raise ConfigError(f"cannot use the requested level: {self._reason(request)}")
                return
            context.request = request
            self._mind_adapters(request)
            wanted = asks.over(levels).over(self._configured)
            is_declined = "elastic" in request.declined
            self._n_switches += context.begin(_WHOLE if is_declined else wanted)
            self._courses[id(request)] = context.course
            if context.level != context.evaluated:
                request.engine.require_evaluation()

    @hookimpl
    def llmaas_draft(self, request: Request, guess: Guess) -> Drafter | None:
        """Let a narrow level draft for the whole model, if weights are read from a file."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
        if context is None or not self._config.drafts or "elastic" in request.declined:
            return None
        if context.native.file_weights().stats()["bytes"] == 0:
            return None
        with self._lock:
            if self._contexts.get(request.engine.ctx) is not context:  # freed meanwhile
                return None
            made = LevelDrafts(context.model.levels)
            drafts = self._drafts.setdefault(context.native.model, made)
        return LevelDrafter(context, drafts, guess)

    @hookimpl
    def llmaas_request_resume(
        self, request: Request, levels: Levels | None, n_generated: int
    ) -> None:
        """Set the level that the request had before another one used its context, or a new one."""
        self.llmaas_request_begin(request, levels)
        context = self._contexts.get(request.engine.ctx)
        if context is None or not n_generated:
            return
        course = context.course
        course.at_first_token = None  # it was chosen before
        course.decode = self._chosen.get(id(request), course.decode)
        try:
            if course.at_resume is not None:
                course.decode = course.at_resume(n_generated)
        finally:
            with self._lock:
                self._n_switches += context.sampled()

    @hookimpl
    def llmaas_request_switch(self, request: Request) -> None:
        """Set the level of the next token of a request that lies aside, or did."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            course = self._courses.get(id(request))
            if context is not None and course is not None:
                context.request = request
                self._n_switches += context.go_on(course)

    @hookimpl
    def llmaas_app_batch(self, ctx: int, scope: RequestScope) -> None:
        """Set the level of the app's own batch."""
        context = self._contexts.get(ctx)
        # another block has other levels, even if equal: its prompt is a new one
        if context is not None and context.rests_at is not scope.levels:
            with self._lock:
                self._rest(context, scope.levels)

    @hookimpl(tryfirst=True)  # before another plugin changes the logits
    def llmaas_logits(self, view: LogitsView) -> None:
        """Switch to the answer's level at the first sampled token."""
        context = self._contexts.get(view.ctx)
        if context is None or context.course.is_decoding:
            return
        course = context.course
        choose, course.at_first_token = course.at_first_token, None
        try:
            if choose is not None:
                course.decode = choose(view.logits)
                self._chosen[id(context.request)] = course.decode
        finally:
            with self._lock:
                self._n_switches += context.sampled()

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count the tokens evaluated at each level, and the passes through streamed weights."""
        context = self._contexts.get(step.ctx)
        if context is not None:
            with self._lock:
                context.evaluated = context.level
                self._n_tokens[context.level] += step.n_tokens
                drafts = self._drafts.get(context.native.model)
            if drafts is not None:
                drafts.memory.passed()

    @hookimpl
    def llmaas_request_end(self, request: Request) -> None:
        """Return the context to the level for use outside requests."""
        with self._lock:
            self._courses.pop(id(request), None)
            self._chosen.pop(id(request), None)
            context = self._contexts.get(request.engine.ctx)
            if context is not None and context.request is request:
                context.request = None
                self._rest(context, Levels())

    @hookimpl
    def llmaas_memory(self) -> list[MemoryClaim]:
        """Tell what the adapters of the open models take, and what levels that draft save."""
        with self._lock:
            models = {id(one.model): one.model for one in self._contexts.values()}.values()
            n_bytes = sum(one.adapters.n_bytes for one in models if one.is_adapted and one.adapters)
            drafts = list(self._drafts.values())
        why = "they bring narrow levels nearer to the whole model"
        adapters = [MemoryClaim.reserved("adapters", n_bytes, why)] if n_bytes else []
        return adapters + [claim for one in drafts if (claim := one.memory.claim()) is not None]

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return the models, the contexts, and the tokens evaluated at each level."""
        with self._lock:
            return {
                "mode": "elastic" if self._contexts else "off",
                "switches": self._n_switches,
                "tokens": {str(level): self._n_tokens[level] for level in sorted(self._n_tokens)},
                "contexts": [one.report() for one in self._contexts.values()],
                "drafts": [one.report() for one in self._drafts.values()],
                "models": {path: one.report() for (path, _), one in self._models.items()},
                "left_alone": list(self._left_alone.values()),
            }

    # -- inside ---------------------------------------------------------------------------------

    def _leave_alone(self, path: str, reason: str) -> None:
        if path not in self._left_alone:
            _log.warning("%s", reason)
        self._left_alone[path] = reason

    def _mind_adapters(self, request: Request) -> None:
        engine, path = request.engine, request.engine.llama.model_path
        has_some = engine.llama.lora_path or "lora" in (engine.alteration or "")
        if has_some and path not in self._adapted:
            self._adapted.add(path)
            _log.warning(
                "%s has a LoRA adapter. An adapter made for this prepared file works; one made for "
                "the original model gives wrong results, because the units were reordered",
                path,
            )

    def _table(self, found: Elastic, path: str) -> str:
        wanted = self._config.table
        if wanted is None:
            wanted = "searched" if "searched" in found.tables else "uniform"
        if wanted not in found.tables:
            raise ConfigError(
                f"{path} has no table {wanted!r}; expected one of {', '.join(found.tables)}. "
                "Leave `table` out to use a table that the file has."
            )
        return wanted

    def _reason(self, request: Request) -> str:
        return self._left_alone.get(request.engine.llama.model_path, _NO_CONTEXT)

    def _rest(self, context: ElasticContext, asks: Levels) -> None:
        """Set a context that serves no request to the levels asked for, or the configured one."""
        level = self._config.level
        levels = asks.over(self._configured) if asks.are_named else Levels(level, level)
        self._n_switches += context.begin(levels)
        context.rests_at = asks
