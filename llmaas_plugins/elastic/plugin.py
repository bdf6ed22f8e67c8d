"""The hooks: which parts of prepared models are in use, and who decides that."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

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
    hookimpl,
)
from llmaas_plugins.elastic.config import ElasticConfig
from llmaas_plugins.elastic.levels import asked, level_index, watchers
from llmaas_plugins.elastic.metadata import Elastic, read_elastic
from llmaas_plugins.elastic.parts import part_claims
from llmaas_plugins.elastic.units import Widths

__all__ = ["ElasticModels"]

_log = logging.getLogger("llmaas.elastic")

_NO_CONTEXT = (
    "no context has levels; it was made before `activate`, or without the hook point in the engine "
    "(`llmaas doctor` says whether there is one)"
)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that was prepared, as it is used here.

    Attributes:
        name: Of its file.
        levels: Widest first.
        table: The name of its widths.
        widths: By level.
        is_compensated: Whether products get biases.
    """

    name: str
    levels: tuple[float, ...]
    table: str
    widths: tuple[Widths, ...]
    is_compensated: bool


@dataclass(slots=True)
class _Context:
    """A context of such a model.

    Attributes:
        native: Where its level is set.
        model: Its model.
        request: The one that it serves.
        levels: Of its prompt, and of what is sampled then.
        is_decoding: Whether something was sampled.
        level: In use.
    """

    native: NativeContext
    model: _Model
    request: Request | None = None
    levels: tuple[float, float] = (1.0, 1.0)
    is_decoding: bool = False
    level: float = 1.0


class ElasticModels:
    """Narrows prepared models, for each request anew."""

    Config: ClassVar[type[ElasticConfig]] = ElasticConfig

    def __init__(self, config: ElasticConfig) -> None:
        """Claim nothing yet."""
        self._config = config
        self._configured = Levels(config.prefill_level, config.decode_level).over(
            Levels(config.level, config.level)
        )
        self._lock = threading.RLock()
        self._models: dict[str, _Model] = {}
        self._paths: dict[int, str] = {}
        self._contexts: dict[int, _Context] = {}
        self._left_alone: dict[str, str] = {}
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
        found = read_elastic(Path(load.path))
        if found is None:
            reason = (
                f"{load.path} has no levels, so all of it is used; "
                f"`llmaas elastic prepare {load.path}` makes a file that has"
            )
            if load.path not in self._left_alone:
                _log.warning("%s", reason)
            self._left_alone[load.path] = reason
            return []
        table = self._table(found, load.path)
        biases = found.biases.get(table) if self._config.compensate else None
        model = _Model(
            Path(load.path).name, found.levels, table, found.tables[table], biases is not None
        )
        self._models[load.path] = model
        return part_claims(found.blocks, model.widths, _by_weight(biases))

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Note which file its model is from."""
        self._paths[create.model] = "" if create.load is None else create.load.path

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep it if its model has levels."""
        model = self._models.get(self._paths.get(context.model, ""))
        if model is None:
            return
        with self._lock:
            watchers.add(self._rest)
            self._contexts[context.ctx] = _Context(context, model)
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
            self._begin(context, asks.over(levels).over(self._configured))

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """From the first sampled token on, use the level of the answer."""
        context = self._contexts.get(view.ctx)
        if context is not None and not context.is_decoding:
            with self._lock:
                context.is_decoding = True
                self._set(context, context.levels[1])

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count its tokens."""
        context = self._contexts.get(step.ctx)
        if context is not None:
            with self._lock:
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
                "contexts": [_context_report(one) for one in self._contexts.values()],
                "models": {path: _model_report(one) for path, one in self._models.items()},
                "left_alone": list(self._left_alone.values()),
            }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Blocks of ``level`` need not tell us any more."""
        watchers.discard(self._rest)

    # -- inside ---------------------------------------------------------------------------------

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
            for context in self._contexts.values():
                if context.request is None:
                    self._settle(context)

    def _settle(self, context: _Context) -> None:
        """Use the level of a context that serves no request."""
        asks, level = asked.get(), self._config.level
        is_asked = asks != Levels()
        self._begin(context, asks.over(self._configured) if is_asked else Levels(level, level))

    def _begin(self, context: _Context, levels: Levels) -> None:
        assert levels.prefill is not None
        assert levels.decode is not None
        context.levels = levels.prefill, levels.decode
        context.is_decoding = False
        self._set(context, levels.prefill)

    def _set(self, context: _Context, level: float) -> None:
        index = level_index(context.model.levels, level)
        if context.level != context.model.levels[index]:
            context.native.level = index
            context.level = context.model.levels[index]
            self._n_switches += 1


def _by_weight(biases: NDArray[np.float16] | None) -> Mapping[str, NDArray[np.float32]]:
    """What is added to the products of each weight, by level; ``(n_levels, n_embd)``."""
    if biases is None:
        return {}
    return {
        f"blk.{layer}.{matrix}.weight": biases[:, layer, i].astype(np.float32)
        for layer in range(biases.shape[1])
        for i, matrix in enumerate(("attn_output", "ffn_down"))
    }


def _context_report(context: _Context) -> dict[str, Any]:
    prefill, decode = context.levels
    return {
        "model": context.model.name,
        "level": context.level,
        "prefill_level": prefill,
        "decode_level": decode,
        "serves_request": context.request is not None,
    }


def _model_report(model: _Model) -> dict[str, Any]:
    return {
        "table": model.table,
        "compensated": model.is_compensated,
        "levels": list(model.levels),
        "widths": {
            str(level): {"groups": _sums(one.groups), "neurons": _sums(one.neurons)}
            for level, one in zip(model.levels, model.widths, strict=True)
        },
    }


def _sums(widths: Sequence[int] | NDArray[np.int32]) -> int:
    """Units in use, in all layers."""
    return int(np.sum(widths))
