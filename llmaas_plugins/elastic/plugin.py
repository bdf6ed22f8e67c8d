"""The hooks: which parts of prepared models are in use, and who decides that."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from llmaas_hooks import (
    ConfigError,
    ContextCreate,
    DecodeStep,
    Levels,
    LogitsView,
    ModelLoad,
    NativeContext,
    Request,
    WeightClaim,
    forks,
    hookimpl,
)
from llmaas_plugins.elastic.config import ElasticConfig
from llmaas_plugins.elastic.contexts import ElasticContext, ElasticModel
from llmaas_plugins.elastic.levels import asked, watchers
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.parts import part_claims

__all__ = ["ElasticModels"]

_log = logging.getLogger("llmaas.elastic")

_WHOLE = Levels(1.0, 1.0)
_NO_CONTEXT = (
    "the context has no levels; it was made before `activate`, or without the hook point in the "
    "engine (`llmaas doctor` says whether there is one)"
)


class ElasticModels:
    """Narrows prepared models, for each request anew."""

    Config: ClassVar[type[ElasticConfig]] = ElasticConfig

    def __init__(self, config: ElasticConfig) -> None:
        """Claim nothing yet."""
        self._config = config
        self._configured = Levels(config.prefill_level, config.decode_level).over(
            Levels(config.level, config.level)
        )
        self._lock = forks.lock()
        self._block = Levels()
        self._models: dict[str, ElasticModel] = {}
        self._paths: dict[int, str] = {}
        self._contexts: dict[int, ElasticContext] = {}
        self._left_alone: dict[str, str] = {}
        self._adapted: set[str] = set()
        self._n_switches = 0
        self._n_tokens: Counter[float] = Counter()

    def problem(self) -> str | None:
        """Why no level can be asked for: no open model has any. None: one has."""
        with self._lock:
            if self._contexts:
                return None
            return next(iter(self._left_alone.values()), _NO_CONTEXT)

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_weights(self, load: ModelLoad) -> list[WeightClaim]:
        """Claim the parts of a model that was prepared."""
        self._models.pop(load.path, None)  # what was there before may be another file
        found = read_elastic(Path(load.path))
        if found is None:
            reason = (
                f"{load.path} has no levels, so all of it is used; "
                f"`llmaas elastic prepare {load.path}` makes a file that has"
            )
            self._leave_alone(load.path, reason)
            return []
        self._left_alone.pop(load.path, None)
        table = self._table(found, load.path)
        widths = found.tables[table]
        biases = found.biases_of(table) if self._config.compensate else {}
        for by_level in biases.values():
            by_level[0] = 0  # the whole model lacks nothing
        name = Path(load.path).name
        self._models[load.path] = ElasticModel(name, found.levels, table, widths, bool(biases))
        return part_claims(found.blocks, widths, biases)

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Note which file its model is from."""
        self._paths[create.model] = "" if create.load is None else create.load.path

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep it if its model has levels."""
        path = self._paths.get(context.model, "")
        model = self._models.get(path)
        if model is None:
            return
        if not context.has_claims:
            self._leave_alone(
                path, f"{path} cannot be narrowed, so all of it is used; the log says what is wrong"
            )
            return
        with self._lock:
            if self._rest not in watchers:
                self._block = asked.get()
                watchers.add(self._rest)
            self._contexts[context.ctx] = ElasticContext(context, model)
            self._settle(self._contexts[context.ctx])

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Let go of it."""
        with self._lock:
            self._contexts.pop(ctx, None)

    @hookimpl
    def llmaas_request_begin(self, request: Request, levels: Levels | None) -> None:
        """Set the level of the prompt."""
        asks = asked.get()
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            if context is None:
                if asks != Levels():
                    raise ConfigError(f"no level can be asked for: {self._reason(request)}")
                return
            context.request = request
            self._mind_adapters(request)
            wanted = asks.over(levels).over(self._configured)
            is_declined = "elastic" in request.declined
            self._n_switches += context.begin(_WHOLE if is_declined else wanted)
            if context.level != context.evaluated:
                request.engine.llama._requires_eval = True

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """From the first sampled token on, use the level of the answer."""
        context = self._contexts.get(view.ctx)
        if context is not None and not context.is_decoding:
            with self._lock:
                self._n_switches += context.sampled()

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count its tokens."""
        context = self._contexts.get(step.ctx)
        if context is not None:
            with self._lock:
                context.evaluated = context.level
                self._n_tokens[context.level] += step.n_tokens

    @hookimpl
    def llmaas_request_end(self, request: Request) -> None:
        """Back to what is configured."""
        with self._lock:
            context = self._contexts.get(request.engine.ctx)
            if context is not None and context.request is request:
                context.request = None
                self._settle(context)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Levels, and what was done at each."""
        with self._lock:
            return {
                "mode": "elastic" if self._contexts else "off",
                "switches": self._n_switches,
                "tokens": {str(level): self._n_tokens[level] for level in sorted(self._n_tokens)},
                "contexts": [one.report() for one in self._contexts.values()],
                "models": {path: one.report() for path, one in self._models.items()},
                "left_alone": list(self._left_alone.values()),
            }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Blocks of ``level`` need not tell us any more."""
        watchers.discard(self._rest)

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
                "%s has a LoRA adapter, which is right if it was made for this file, and wrong if "
                "for the model that this was prepared from: units are in another order",
                path,
            )

    def _table(self, found: Elastic, path: str) -> str:
        wanted = self._config.table
        if wanted is None:
            wanted = "searched" if "searched" in found.tables else "uniform"
        if wanted not in found.tables:
            raise ConfigError(
                f"{path} has no table {wanted!r}; expected one of {', '.join(found.tables)}. "
                "Leave `table` out to take what there is."
            )
        return wanted

    def _reason(self, request: Request) -> str:
        return self._left_alone.get(request.engine.llama.model_path, _NO_CONTEXT)

    def _rest(self) -> None:
        """A block of ``level`` began or ended: what serves no request follows."""
        with self._lock:
            self._block = asked.get()
            for context in self._contexts.values():
                if context.request is None:
                    with contextlib.suppress(ReferenceError):  # the suite ends meanwhile
                        self._settle(context)

    def _settle(self, context: ElasticContext) -> None:
        """Use the level of a context that serves no request."""
        asks, level = self._block, self._config.level
        levels = asks.over(self._configured) if asks != Levels() else Levels(level, level)
        self._n_switches += context.begin(levels)
