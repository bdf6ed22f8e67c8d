"""The hooks: which models are streamed, and how much of them stays in memory."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

from llmaas_hooks import (
    BudgetError,
    ConfigError,
    ContextCreate,
    DecodeStep,
    LogitsView,
    ModelLoad,
    NativeContext,
    Request,
    TensorInfo,
    WeightClaim,
    hookimpl,
)
from llmaas_plugins.flash_weights.answers import Answers
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.memory import require
from llmaas_plugins.flash_weights.model_sizes import Metadata, ModelSizes, metadata_of, sizes_of
from llmaas_plugins.flash_weights.packed import packed_path, packed_problem
from llmaas_plugins.flash_weights.planner import least_budget
from llmaas_plugins.flash_weights.residency import Residency
from llmaas_plugins.flash_weights.sparse import add_channels, model_channels
from llmaas_plugins.machine import drop_cached, release_memory, resident_bytes

__all__ = ["FlashWeights"]

_log = logging.getLogger("llmaas.flash_weights")

_OUTSIDE = 128 << 20
"""A process around a model whose weights all fit: the interpreter, libraries, a short context."""
_SHORTEST = 512
"""Tokens of a context, before anybody knows how many it will have: what ``Llama`` takes."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """A model file that was claimed.

    Attributes:
        tensors: What it has.
        process: Bytes of the process before it was loaded, without streamed weights.
    """

    tensors: Mapping[str, TensorInfo]
    process: int


@dataclass(frozen=True, slots=True)
class _Growth:
    """Bytes that are expected once a new context computes.

    Attributes:
        buffers: For a batch.
        process: Of the process without streamed weights; 0: as it is.
    """

    buffers: int
    process: int


class FlashWeights:
    """Streams the weights that the memory budget has no room for."""

    Config: ClassVar[type[FlashWeightsConfig]] = FlashWeightsConfig

    def __init__(self, config: FlashWeightsConfig) -> None:
        """Claim nothing yet."""
        self._config = config
        self._residency = Residency(config.memory_budget, config.arena)
        self._left_alone: dict[str, str] = {}
        self._loads: dict[str, _Loading] = {}
        self._paths: dict[int, str] = {}
        self._growth: dict[int, _Growth] = {}
        self._answers = Answers()
        if config.mode != "sparse":  # it costs something for each token
            self.llmaas_logits = None  # type: ignore[method-assign,assignment]

    @contextmanager
    def answer(self, llama: Any) -> Iterator[None]:
        """Take what the app evaluates itself inside the block for an answer: sparse mode only.

        Requests need no block. Elsewhere, ``Llama.eval`` and ``llama_decode`` are exact.

        Args:
            llama: The ``Llama`` whose batches of one token are computed sparsely.
        """
        with self._answers.block(int(llama.ctx)):
            yield

    def set_memory_budget(self, n_bytes: int | None) -> None:
        """Change the memory of the whole process; it holds when this returns.

        Args:
            n_bytes: As ``memory_budget`` of the configuration; ``None`` follows the system.

        Raises:
            BudgetError: It cannot be met. Nothing was changed.
        """
        self._residency.set_budget(n_bytes)

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_weights(
        self, load: ModelLoad, tensors: Mapping[str, TensorInfo]
    ) -> list[WeightClaim]:
        """Claim all matrices of a model that does not fit; in the sparse mode of any."""
        if self._config.mode == "sparse":
            model_channels(load.path, tensors)  # before the model is read, not after
        elif self._fits(load.path, tensors):
            return []
        names = [name for name, info in tensors.items() if info.is_matrix]
        packed = self._packed(load.path, tensors)
        self._prepare(load.path, tensors)
        # Edited last: a model that was refused above may be loaded as the app asked.
        # A tensor is read as a whole, and twice as much memory is taken for that with direct I/O.
        load.params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        if packed is None:  # what is in memory is what the file has, so nothing else is repacked
            load.params.use_extra_bufts = False
        pattern = "|".join(map(re.escape, names))
        return [WeightClaim(pattern, source="file", path=packed)] if names else []

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Note which file its model is from; see that there is room for the context."""
        path = self._paths[create.model] = "" if create.load is None else create.load.path
        if path in self._loads:
            self._reserve(create, self._loads[path])

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Give a streamed model its arena, and its share of the memory."""
        weights = context.file_weights()
        stats = weights.stats()
        if stats["bytes"] == 0:
            return
        path = self._paths.get(context.model, "")
        is_sparse = self._config.mode == "sparse" and path in self._loads
        if is_sparse and stats["operands"] == 0:  # its first context
            file = model_channels(path, self._loads[path].tensors)
            add_channels(weights, file, self._config)
            release_memory()  # of the scales, which were copied
        if is_sparse:
            self._answers.add(context)
        if context.model not in self._residency:
            drop_cached(path)  # it was read as a whole, and will be read past the page cache
            weights.set_reading(
                queue_depth=self._config.queue_depth or 0,
                read_size=self._config.read_size or 0,
                read_gap=self._config.read_gap,
            )
        with self._residency.lock:
            growth = self._growth.pop(context.model, _Growth(0, 0))
            beside = growth.process - growth.buffers - self._residency.others()
            self._residency.add(context, growth.buffers, max(beside, 0))

    @hookimpl
    def llmaas_request_begin(self, request: Request) -> None:
        """Compute the prompt exactly."""
        self._answers.begin(request)

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """Compute what follows the first sampled token sparsely."""
        self._answers.sampled(view.ctx)

    @hookimpl
    def llmaas_request_end(self, request: Request) -> None:
        """Compute exactly again."""
        self._answers.end(request)

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count it, and see what memory is left."""
        self._residency.decoded(step.ctx, step.n_tokens)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Let go of it."""
        self._answers.forget(ctx)
        self._residency.remove(ctx)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Mode, memory, and what was read."""
        models = self._residency.report()
        faults = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "mode": self._config.mode if models else "off",
            "memory_budget": self._residency.budget,
            "resident_bytes": resident_bytes(),
            "major_faults": faults.ru_majflt,
            "minor_faults": faults.ru_minflt,
            "models": models,
            "without_drafts": self._answers.n_without_drafts,
            "left_alone": self._left_alone,
        }

    # -- memory ---------------------------------------------------------------------------------

    def _prepare(self, path: str, tensors: Mapping[str, TensorInfo]) -> None:
        """Have other models make room for loading one.

        Raises:
            BudgetError: There cannot be so much. Then the least is that of the shortest context.
        """
        residency, sizes = self._residency, sizes_of(tensors, Metadata(0, 1.0), _SHORTEST)
        with residency.lock:
            release_memory()  # of what the files were checked with
            residency.look()
            process = residency.others()
            self._loads[path] = _Loading(tensors, process)
            try:
                residency.make_room(sizes.resident + sizes.app + sizes.largest)
            except BudgetError:
                del self._loads[path]
                found = sizes_of(tensors, metadata_of(Path(path)), _SHORTEST)
                require(residency.budget, self._least(found, process))
                raise

    def _reserve(self, create: ContextCreate, loading: _Loading) -> None:
        """Have other contexts make room for a new one.

        Raises:
            BudgetError: There cannot be so much.
        """
        params, residency = create.params, self._residency
        n_ctx = int(params.n_ctx) or llama_cpp.llama_model_n_ctx_train(create.model)
        heads = Metadata(llama_cpp.llama_model_n_head(create.model), 1.0)
        n_batch = int(params.n_ubatch) or int(params.n_batch)
        sizes = sizes_of(loading.tensors, heads, n_ctx, n_batch=n_batch)
        sizes = replace(sizes, kv=int(sizes.kv * _cell_bytes(params) / 4))
        with residency.lock:
            if create.model in residency:  # its weights have what they need
                residency.make_room(sizes.kv + sizes.buffers)
            else:
                require(residency.budget, self._least(sizes, loading.process))
                residency.make_room(sizes.kv)
            own = sizes.kv + sizes.buffers + sizes.resident + sizes.app
            is_new = create.model not in residency
            self._growth[create.model] = _Growth(
                sizes.buffers, loading.process + own if is_new else 0
            )

    def _least(self, sizes: ModelSizes, process: int) -> int:
        """Return the least budget for one more model beside those there are."""
        keeps = self._config.cache if self._config.mode == "sparse" else None
        return self._residency.needed() + least_budget(sizes, process, keeps, self._config.arena)

    def _fits(self, model: str, tensors: Mapping[str, TensorInfo]) -> bool:
        n_bytes = sum(info.n_bytes for info in tensors.values())
        budget = self._residency.budget
        fits = resident_bytes() + n_bytes + _OUTSIDE <= budget
        if fits:
            self._left_alone[model] = (
                f"its {n_bytes >> 20} MiB fit into {budget >> 20} MiB, so it runs as without us"
            )
        return fits

    def _packed(self, model: str, tensors: Mapping[str, TensorInfo]) -> str | None:
        """A model's packed file; None without one: llama.cpp's faster kernels are lost then."""
        path = packed_path(model)
        if not path.exists():
            _log.warning(
                "%s is streamed from its own file, which is slower to compute with; "
                "`llmaas flash pack %s` makes a faster one",
                model,
                model,
            )
            return None
        problem = packed_problem(path, model, tensors)
        if problem is not None:
            raise ConfigError(
                f"{path} cannot be used: {problem}. Run `llmaas flash pack {model}` again, or "
                "remove it."
            )
        return str(path)


def _cell_bytes(params: Any) -> float:
    """Return the bytes of a key and a value."""
    sizes = (GGML_QUANT_SIZES[GGMLQuantizationType(int(t))] for t in (params.type_k, params.type_v))
    return sum(n_bytes / n_values for n_values, n_bytes in sizes)
