"""The hooks: which models are streamed, and how much of them stays in memory."""

from __future__ import annotations

import logging
import re
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from llama_cpp import llama_cpp

from llmaas_hooks import (
    BudgetError,
    ConfigError,
    ContextCreate,
    DecodeStep,
    FileWeights,
    LogitsView,
    ModelLoad,
    NativeContext,
    Request,
    TensorInfo,
    WeightClaim,
    forks,
    hookimpl,
)
from llmaas_plugins.flash_weights.answers import Answers
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.packed import packed_path, packed_problem
from llmaas_plugins.flash_weights.sparse import add_channels, model_channels
from llmaas_plugins.machine import available_bytes, release_memory, resident_bytes

__all__ = ["FlashWeights"]

_log = logging.getLogger("llmaas.flash_weights")

_SHARE = 0.9
"""Of what could be had: the rest is for whoever else wants memory."""
_SPARE = 6 << 20
"""For what grows beside weights: the app's own objects, a batch's logits."""
_STEP = 2 << 20
"""Smaller changes of what is kept are not worth the reading."""
_OUTSIDE = 128 << 20
"""A process around a model whose weights all fit: the interpreter, libraries, a short context."""
_EVERY_S = 0.25


@dataclass(slots=True)
class _Model:
    """A streamed model: its contexts, what is kept of it, and what it was used for so far."""

    contexts: dict[int, NativeContext] = field(default_factory=dict)
    kept: int = 0
    n_batches: int = 0
    n_tokens: int = 0
    is_crowded: bool = False
    looked_at: float = 0.0

    @property
    def weights(self) -> FileWeights:
        """Its memory, which all contexts share."""
        return next(iter(self.contexts.values())).file_weights()


class FlashWeights:
    """Streams the weights that the memory budget has no room for."""

    Config: ClassVar[type[FlashWeightsConfig]] = FlashWeightsConfig

    def __init__(self, config: FlashWeightsConfig) -> None:
        """Claim nothing yet."""
        self._config = config
        self._budget: int | None = config.memory_budget
        self._lock = forks.lock()
        self._models: dict[int, _Model] = {}
        self._left_alone: dict[str, str] = {}
        self._tensors: dict[str, Mapping[str, TensorInfo]] = {}
        self._paths: dict[int, str] = {}
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
        """Change the memory of the whole process; it holds from the next batch on.

        Args:
            n_bytes: As ``memory_budget`` of the configuration; ``None`` follows the system.

        Raises:
            BudgetError: Less than the process needs beside the weights. Nothing was changed.
        """
        with self._lock:
            budget = self._budget_of(n_bytes)
            for model in self._models.values():
                self._room(model, budget)
            self._budget = n_bytes
            for model in self._models.values():
                self._adapt(model)

    # -- hooks ----------------------------------------------------------------------------------

    @hookimpl
    def llmaas_weights(
        self, load: ModelLoad, tensors: Mapping[str, TensorInfo]
    ) -> list[WeightClaim]:
        """Claim all matrices of a model that does not fit; in the sparse mode of any."""
        if self._config.mode == "sparse":
            model_channels(load.path, tensors)  # before the model is read, not after
            self._tensors[load.path] = tensors
        elif self._fits(load.path, tensors):
            return []
        # the model file's pages in the page cache would be memory beside that of the weights
        load.params.load_mode = llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO
        names = [name for name, info in tensors.items() if info.is_matrix]
        packed = self._packed(load.path, tensors)
        if packed is None:  # what is in memory is what the file has, so nothing else is repacked
            load.params.use_extra_bufts = False
        pattern = "|".join(map(re.escape, names))
        return [WeightClaim(pattern, source="file", path=packed)] if names else []

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Note which file its model is from."""
        self._paths[create.model] = "" if create.load is None else create.load.path

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Give a streamed model its arena; what is kept is decided after its first batch."""
        weights = context.file_weights()
        stats = weights.stats()
        if stats["bytes"] == 0:
            return
        with self._lock:
            path = self._paths.get(context.model, "")
            if path in self._tensors and stats["operands"] == 0:  # its first context
                add_channels(weights, model_channels(path, self._tensors[path]), self._config)
                release_memory()  # of the scales, which were copied
            if self._config.mode == "sparse":
                self._answers.add(context)
            if context.model not in self._models:
                weights.set_reading(
                    queue_depth=self._config.queue_depth or 0,
                    read_size=self._config.read_size or 0,
                    read_gap=self._config.read_gap,
                )
            model = self._models.setdefault(context.model, _Model())
            model.contexts[context.ctx] = context
            weights.set_memory(model.kept, self._config.arena)
            self._room(model, self._budget_of(self._budget))

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
        with self._lock:
            for model in self._models.values():
                if step.ctx not in model.contexts:
                    continue
                model.n_batches += 1
                model.n_tokens += step.n_tokens
                if time.monotonic() - model.looked_at > _EVERY_S:
                    self._adapt(model)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Let go of it."""
        self._answers.forget(ctx)
        with self._lock:
            for address, model in list(self._models.items()):
                model.contexts.pop(ctx, None)
                if not model.contexts:
                    del self._models[address]

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Mode, memory, and what was read."""
        with self._lock:
            models = [
                {"batches": model.n_batches, "tokens": model.n_tokens} | model.weights.stats()
                for model in self._models.values()
            ]
            budget = self._budget_of(self._budget)
            faults = resource.getrusage(resource.RUSAGE_SELF)
            return {
                "mode": self._config.mode if models else "off",
                "memory_budget": budget,
                "resident_bytes": resident_bytes(),
                "major_faults": faults.ru_majflt,
                "minor_faults": faults.ru_minflt,
                "models": models,
                "without_drafts": self._answers.n_without_drafts,
                "left_alone": self._left_alone,
            }

    # -- memory ---------------------------------------------------------------------------------

    def _budget_of(self, wanted: int | None) -> int:
        return int(_SHARE * available_bytes()) if wanted is None else int(wanted)

    def _adapt(self, model: _Model) -> None:
        """Keep as many weights as there is room for; none if others took it all."""
        try:
            room = self._room(model, self._budget_of(self._budget))
        except BudgetError as error:
            room = 0
            if not model.is_crowded:
                _log.warning("%s Every weight is streamed until there is more.", error)
        model.is_crowded = room == 0
        model.looked_at = time.monotonic()
        is_whole = room >= model.weights.stats()["bytes"] > model.kept
        if room < model.kept or room - model.kept >= _STEP or is_whole:
            model.kept = room
            model.weights.set_memory(room, self._config.arena)

    def _room(self, model: _Model, budget: int) -> int:
        """Bytes of weights that fit beside everything else.

        Raises:
            BudgetError: None do, and the arena does not either.
        """
        stats = model.weights.stats()
        passing = stats["passing_bytes"]
        others = resident_bytes() - stats["kept_bytes"] - stats["arena_bytes"] - passing + _SPARE
        arena = max(self._config.arena, stats["arena_bytes"])
        room = budget - others - arena - passing
        # what larger batches compute in is the engine's to make room for
        others += sum(context.untouched_bytes() for context in model.contexts.values())
        through = arena + passing + stats["least_bytes"]
        if budget < others + through:
            least = -(-(others + through) // (1 << 20))
            raise BudgetError(
                f"memory_budget is {budget >> 20} MiB, but without any weights this process takes "
                f"{others >> 20} MiB, and {through >> 20} MiB to stream them through; expected "
                f"{least} MiB or more. A shorter n_ctx or a smaller n_batch takes less."
            )
        return room

    def _fits(self, model: str, tensors: Mapping[str, TensorInfo]) -> bool:
        n_bytes = sum(info.n_bytes for info in tensors.values())
        budget = self._budget_of(self._budget)
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
