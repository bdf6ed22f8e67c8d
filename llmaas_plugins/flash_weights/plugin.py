"""Hooks of the flash_weights plugin: choose which models to stream, and share out memory."""

from __future__ import annotations

import gc
import logging
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from llama_cpp import llama_cpp

from llmaas_hooks import (
    BudgetError,
    ConfigError,
    ContextCreate,
    DecodeStep,
    LogitsView,
    MemoryClaim,
    ModelFile,
    ModelLoad,
    NativeContext,
    Request,
    TensorInfo,
    UnmetBudgetError,
    WeightClaim,
    hookimpl,
)
from llmaas_plugins import process_memory
from llmaas_plugins.flash_weights.answers import Answers
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.engine_modes import least_budget
from llmaas_plugins.flash_weights.memory import MARGIN_BYTES, require
from llmaas_plugins.flash_weights.model_sizes import (
    Metadata,
    ModelSizes,
    metadata_of,
    sizes_of,
    whole_bytes,
)
from llmaas_plugins.flash_weights.packed import packed_path, packed_problem
from llmaas_plugins.flash_weights.residency import Residency
from llmaas_plugins.flash_weights.sparse import add_channels, model_channels
from llmaas_plugins.machine import drop_cached, release_memory, resident_bytes
from llmaas_plugins.model.cell_sizes import all_cell_bytes, cell_bytes, n_ctx_of
from llmaas_plugins.model.digest import files_now
from llmaas_plugins.sizes import memory_bytes

__all__ = ["FlashWeights"]

_T = TypeVar("_T")

_log = logging.getLogger("llmaas.flash_weights")

_SHORTEST = 512
"""Tokens to assume for a context of unknown length: the default of ``Llama``."""
_ATTEMPTS = 8
"""Times to let other users release memory before a shortage is reported."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """Model file that was claimed.

    Attributes:
        tensors: Tensors of the file.
        metadata: Metadata of the file.
        process: Bytes of the process before loading, without streamed weights and without memory
            that other plugins can release.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Metadata
    process: int


@dataclass(frozen=True, slots=True)
class _Growth:
    """Bytes that a new context will need once it computes.

    Attributes:
        buffers: Compute buffers for a batch.
        process: The process without streamed weights; 0 for its current size.
    """

    buffers: int
    process: int


class FlashWeights:
    """Plugin that streams the weights that do not fit into the memory budget."""

    Config: ClassVar[type[FlashWeightsConfig]] = FlashWeightsConfig

    def __init__(self, config: FlashWeightsConfig) -> None:
        """Prepare the memory budget; models are claimed by the hooks."""
        self._config = config
        self._residency = Residency(config.memory_budget, config.arena)
        self._left_alone: dict[str, str] = {}
        self._distilled: dict[str, dict[str, Any]] = {}
        self._loads: dict[str, _Loading] = {}
        self._growth: WeakKeyDictionary[ModelLoad, _Growth] = WeakKeyDictionary()
        self._answers = Answers()
        if config.mode != "sparse":  # the hook costs time per token
            self.llmaas_logits = None  # type: ignore[method-assign,assignment]
            self.llmaas_request_resume = None  # type: ignore[method-assign,assignment]

    @contextmanager
    def answer(self, llama: Any) -> Iterator[None]:
        """Decode sparsely inside the block where the app calls ``Llama.eval`` itself.

        Requests need no block. Outside blocks and requests, ``Llama.eval`` and ``llama_decode`` are
        exact. The block has an effect only in the sparse mode.

        Args:
            llama: ``Llama`` whose batches of one token are computed sparsely.
        """
        with self._answers.block(int(llama.ctx)):
            yield

    def set_memory_budget(self, budget: int | str | None) -> None:
        """Change the memory budget of the whole process. It is met when this method returns.

        Args:
            budget: New budget, in bytes or as ``memory_budget`` in the configuration; ``None``
                follows the system.

        Raises:
            ConfigError: The budget is neither a size nor a share. Nothing was changed.
            UnmetBudgetError: The budget cannot be met. Nothing was changed.
        """
        try:
            n_bytes = None if budget is None else memory_bytes(budget)
        except ValueError as error:
            raise ConfigError(f"the memory budget: {error}, found {budget!r}") from error
        _with_room(lambda: self._residency.set_budget(n_bytes))
        self._residency.relieve()

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_weights(
        self, load: ModelLoad, tensors: Mapping[str, TensorInfo]
    ) -> list[WeightClaim]:
        """Claim all matrices of a model that does not fit, or of any model in the sparse mode."""
        if self._config.mode == "sparse":
            model_channels(load, tensors)  # fail before the model is read
        elif self._fits(load.path, tensors):
            return []
        names = [name for name, info in tensors.items() if info.is_matrix]
        packed = self._packed(load.path, tensors)
        with self._advisory():
            self._prepare(load.path, tensors)
        # Last, as a refused model may be loaded as the app asked. llama.cpp reads each tensor as a
        # whole here, for which direct I/O would take twice the memory.
        load.params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        if packed is None:  # memory must hold the file's bytes, so llama.cpp may repack nothing
            load.params.use_extra_bufts = False
        pattern = "|".join(map(re.escape, names))
        path, stamp = packed or (None, None)
        return [WeightClaim(pattern, source="file", path=path, stamp=stamp)] if names else []

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Make room for a context."""
        load = create.load
        if load is not None and load.is_claimed and load.path in self._loads:
            with self._advisory():
                loading = self._loads[load.path]
                self._growth[load] = _with_room(lambda: self._reserve(create, loading))
        else:
            self._residency.relieve(all_cell_bytes(create))

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Give a streamed model its arena and its share of the memory."""
        weights = context.file_weights()
        stats = weights.stats()
        if stats["bytes"] == 0:
            self._residency.add_unstreamed(context)
            return
        load = context.load
        path = "" if load is None else load.path
        is_sparse = self._config.mode == "sparse" and path in self._loads
        if load is not None and is_sparse and stats["operands"] == 0:  # first context of the model
            file = model_channels(load, self._loads[path].tensors)
            add_channels(weights, file, self._config)
            self._distilled.pop(path, None)
            if file.distilled is not None:
                self._distilled[path] = file.distilled._asdict()
            release_memory()  # the scales, which were copied
        if is_sparse:
            self._answers.add(context)
        if context.model not in self._residency:
            drop_cached(path)  # loading filled the page cache; later reads bypass it
            weights.set_reading(
                queue_depth=self._config.queue_depth or 0,
                read_size=self._config.read_size or 0,
                read_gap=self._config.read_gap,
            )
        growth = _Growth(0, 0) if load is None else self._growth.pop(load, _Growth(0, 0))
        with self._residency.lock:
            beside = max(0, growth.process - growth.buffers - self._residency.others())
        with self._advisory():
            _with_room(lambda: self._residency.add(context, growth.buffers, beside))

    @hookimpl
    def llmaas_request_begin(self, request: Request) -> None:
        """Compute the prompt exactly, and expect the memory that a first batch takes."""
        self._residency.begin(request.engine.ctx)
        self._answers.begin(request)

    @hookimpl
    def llmaas_request_resume(self, request: Request, n_generated: int) -> None:
        """Compute as before another request used the engine: sparsely in an answer."""
        self._answers.resume(request, n_generated)

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """Compute sparsely from the first sampled token on."""
        self._answers.sampled(view.ctx)

    @hookimpl
    def llmaas_request_end(self, request: Request) -> None:
        """Compute exactly after the request."""
        self._residency.end(request.engine.ctx)
        self._answers.end(request)

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count the decoded tokens, and adjust the memory."""
        self._residency.decoded(step.ctx, step.n_tokens)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Stop tracking the context and return its memory."""
        self._answers.forget(ctx)
        self._residency.remove(ctx)

    @hookimpl
    def llmaas_memory(self) -> list[MemoryClaim]:
        """Tell what kept weights save."""
        return self._residency.claims()

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Limit the process no longer."""
        process_memory.remove_limit(self._residency)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return the mode, the memory in use, and the amount read."""
        report = self._residency.report()
        faults = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "mode": self._config.mode if report["models"] else "off",
            **report,
            "resident_bytes": resident_bytes(),
            "major_faults": faults.ru_majflt,
            "minor_faults": faults.ru_minflt,
            "without_drafts": self._answers.n_without_drafts,
            "distilled": self._distilled,
            "left_alone": self._left_alone,
        }

    # -- memory ---------------------------------------------------------------------------------

    def _prepare(self, path: str, tensors: Mapping[str, TensorInfo]) -> None:
        """Make other models release memory so that a model can be loaded.

        Raises:
            UnmetBudgetError: The memory cannot be released. The message gives the least budget
                with the shortest context.
        """
        metadata = metadata_of(Path(path))
        sizes = sizes_of(tensors, metadata, _SHORTEST)
        gc.collect()
        release_memory()  # memory that checking the files took
        residency = self._residency
        try:
            process = _with_room(lambda: self._make_loading_room(sizes))
        except UnmetBudgetError:
            with residency.lock:
                residency.look()
                needed = self._needed(sizes)
                require(residency.budget, residency.others(), needed, _SHORTEST)
            raise
        self._loads[path] = _Loading(tensors, metadata, process)

    def _make_loading_room(self, sizes: ModelSizes) -> int:
        """Make room for loading a model; return the bytes of the process for ``_Loading``."""
        residency = self._residency
        with residency.lock:
            residency.look()
            process = residency.others() - process_memory.releasable()
            residency.make_room(sizes.resident + sizes.app + sizes.largest)
            return process

    def _reserve(self, create: ContextCreate, loading: _Loading) -> _Growth:
        """Make other contexts release memory for a new one; return what it will need later.

        Raises:
            UnmetBudgetError: The memory cannot be released.
        """
        params, residency, n_ctx = create.params, self._residency, n_ctx_of(create)
        sizes = sizes_of(
            loading.tensors,
            loading.metadata,
            n_ctx,
            n_batch=int(params.n_ubatch) or int(params.n_batch),
            cell_bytes=cell_bytes(params),
            is_flash=params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        )
        with residency.lock:
            process = loading.process + process_memory.releasable()
            if create.model in residency:  # its weights already have their memory
                residency.make_room(sizes.kv + sizes.buffers + sizes.work)
            else:
                require(residency.budget, process, self._needed(sizes), n_ctx)
                residency.make_room(sizes.kv)
            own = sizes.kv + sizes.buffers + sizes.resident + sizes.app + sizes.work
            is_new = create.model not in residency
            return _Growth(sizes.buffers, process + own if is_new else 0)

    def _needed(self, sizes: ModelSizes) -> int:
        """Return the least bytes for one more model and the current ones."""
        config, is_sparse = self._config, self._config.mode == "sparse"
        keeps, preload = config.cache if is_sparse else None, config.preload and is_sparse
        least = least_budget(sizes, 0, keeps, config.arena, preload=preload)
        return self._residency.needed() + least

    @contextmanager
    def _advisory(self) -> Iterator[None]:
        """Let the app go on after a budget error if the user set no budget."""
        try:
            yield
        except UnmetBudgetError as error:
            if self._residency.is_set:
                raise
            raise BudgetError(str(error)) from error

    def _fits(self, model: str, tensors: Mapping[str, TensorInfo]) -> bool:
        n_bytes = sum(info.n_bytes for info in tensors.values())
        budget = self._residency.budget
        # a budget that is set is kept, so a context must fit beside the weights
        metadata = metadata_of(Path(model)) if self._residency.is_set else None
        needed = whole_bytes(tensors, metadata)
        missing = resident_bytes() + process_memory.promised() + needed - budget
        if 0 < missing <= process_memory.releasable():
            missing -= process_memory.release(missing)
        if missing <= 0:
            sizes = f"{n_bytes >> 20} MiB fit into {budget >> 20} MiB"
            self._left_alone[model] = f"its {sizes}, so it is not streamed"
        return missing <= 0

    def _packed(self, model: str, tensors: Mapping[str, TensorInfo]) -> ModelFile | None:
        """Return a model's packed file, or None if there is none.

        Without it, llama.cpp's faster kernels cannot be used.
        """
        path = packed_path(model)
        (found,) = files_now(path)  # identify the file before it is checked
        if not path.exists():
            _log.warning(
                "%s is streamed from its own file, which makes computing slower; "
                "`llmaas flash pack %s` writes a faster file",
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
        return found


def _with_room(attempt: Callable[[], _T]) -> _T:
    """Return the result of ``attempt``; on a shortage, let others release memory and try again.

    It tries several times, because the process may grow meanwhile.
    """
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except UnmetBudgetError as error:
            if error.missing > process_memory.releasable():
                raise
            if not process_memory.release(error.missing + MARGIN_BYTES):
                raise
    return attempt()
