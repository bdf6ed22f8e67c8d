"""Share the memory budget among the streamed models of a process."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from llmaas_hooks import MemoryClaim, NativeContext, UnmetBudgetError, forks
from llmaas_plugins import process_memory
from llmaas_plugins.flash_weights.memory import (
    MARGIN_BYTES,
    Needs,
    needed_by,
    require,
    shares,
)
from llmaas_plugins.flash_weights.savings import WeightSavings
from llmaas_plugins.flash_weights.streamed_model import StreamedModel, untouched_bytes
from llmaas_plugins.machine import resident_bytes

__all__ = ["Residency"]

_log = logging.getLogger("llmaas.flash_weights")

_STEP = 2 << 20
"""Least change of a model's kept weights that is worth the reading."""
_EVERY_S = 0.25


class Residency:
    """Division of the memory budget among streamed models, by size.

    Attributes:
        lock: Lock of the models. It is reentrant: garbage collection inside it may free a context.
    """

    def __init__(self, budget: int | None, arena: int) -> None:
        """Start without models.

        Args:
            budget: Memory of the process; None follows the system.
            arena: Bytes of the buffer that a model's streamed weights pass through.
        """
        self.lock = forks.lock()
        self._budget = budget
        self._arena = arena
        self._models: dict[int, StreamedModel] = {}
        self._savings = WeightSavings()
        self._is_crowded = False
        self._looked_at = 0.0
        self._unstreamed: dict[int, NativeContext] = {}
        self._untouched: dict[int, int] = {}
        process_memory.add_limit(self)

    @property
    def budget(self) -> int:
        """Bytes of memory that the process may use."""
        return self._bytes_of(self._budget)

    @property
    def is_set(self) -> bool:
        """Whether the user set a budget; otherwise it follows the system."""
        return self._budget is not None or process_memory.budget() is not None

    def set_budget(self, n_bytes: int | None) -> None:
        """Change the memory budget; excess memory is released before this method returns.

        Raises:
            UnmetBudgetError: The budget cannot be met. Nothing was changed.
        """
        with self.lock:
            self.look()
            self._require(self._bytes_of(n_bytes))
            self._budget = n_bytes
            self.share(waits=True)

    def __contains__(self, model: int) -> bool:
        """Return whether a model is streamed."""
        return model in self._models

    def add(self, context: NativeContext, growth: int, beside: int) -> None:
        """Add a new context and share the budget again.

        Args:
            context: The new context.
            growth: Bytes of compute buffers that the context will touch; kept weights are released
                then.
            beside: Other bytes that the context will take.

        Raises:
            UnmetBudgetError: The budget cannot be met.
        """
        with self.lock:
            model = self._models.setdefault(context.model, StreamedModel(self._savings))
            model.contexts[context.ctx] = context
            model.growth[context.ctx], model.beside[context.ctx] = growth, beside
            model.weights.set_memory(model.kept, self._arena)
            self.look()
            self.share(waits=True)

    def add_unstreamed(self, context: NativeContext) -> None:
        """Count the compute buffers that a context of a model in memory will touch."""
        with self.lock:
            self._unstreamed[context.ctx] = context
            self._untouched[context.ctx] = untouched_bytes(context)
        self.relieve()

    def remove(self, ctx: int) -> None:
        """Remove a context that is about to be freed.

        With its last context, a model's weights are released, too.
        """
        with self.lock:
            self._unstreamed.pop(ctx, None)
            self._untouched.pop(ctx, None)
            for address, model in list(self._models.items()):
                if ctx not in model.contexts:
                    continue
                model.growth.pop(ctx, None)
                model.beside.pop(ctx, None)
                if len(model.contexts) == 1:
                    # A context that is gone already took its model's weights with it.
                    with contextlib.suppress(ReferenceError):
                        model.weights.set_memory(0, 0)
                    del self._models[address]
                else:
                    model.began = None
                    del model.contexts[ctx]

    def begin(self, ctx: int) -> None:
        """Note that a request begins, whose first batch may take all that is foreseen for it."""
        for model in list(self._models.values()):
            if ctx in model.growth:
                model.began = process_memory.beside_others()

    def end(self, ctx: int) -> None:
        """Expect nothing more of a request that is over, even if it was stopped in that batch."""
        for model in list(self._models.values()):
            if ctx in model.contexts:
                model.began = None

    def decoded(self, ctx: int, n_tokens: int) -> None:
        """Count a batch, and adjust to the memory that is left."""
        with self.lock:
            is_first = self._count(ctx, n_tokens)
            is_due = is_first or time.monotonic() - self._looked_at > _EVERY_S
            if is_due:
                self._looked_at = time.monotonic()
                self._look_at(ctx)
        if is_due:
            self.relieve()
            with self.lock:
                if self._models:
                    self._share_or_tell()

    def _count(self, ctx: int, n_tokens: int) -> bool:
        """Count a batch; return whether it is the first one of a streamed model's context."""
        is_first = False
        for model in list(self._models.values()):
            if ctx in model.contexts:
                model.n_batches += 1
                model.n_tokens += n_tokens
                is_first = model.growth.pop(ctx, None) is not None
                model.beside.pop(ctx, None)
                model.began = None
                if model.is_late:
                    self._apply(model, model.kept, waits=True)
        return is_first

    def _look_at(self, ctx: int) -> None:
        """Refresh the figures of one context and its model, which do not compute now."""
        for model in list(self._models.values()):
            if ctx in model.contexts:
                model.look()
        if (context := self._unstreamed.get(ctx)) is not None:
            with contextlib.suppress(ReferenceError):
                self._untouched[ctx] = untouched_bytes(context)

    def needed(self) -> int:
        """Return the least bytes that the current models need."""
        return needed_by(self._needs(list(self._models.values())))

    def others(self) -> int:
        """Return the bytes of the process beside streamed weights, with those that are promised."""
        return resident_bytes() - self.held_bytes + process_memory.promised()

    # -- memory of other plugins ----------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes of streamed weights, as last seen; without the lock, which another may hold."""
        return sum(model.held for model in list(self._models.values()))

    def room(self) -> int | None:
        """Return the bytes that others may take before the budget is exceeded; None if it is unset.

        Weights make room for them down to their least bytes. The result is negative if the budget
        is exceeded.
        """
        if not self.is_set:
            return None
        with self.lock:
            taken = self.others() + self.needed() + sum(self._untouched.values())
            taken -= self._foreseen_and_taken()
            return self.budget - process_memory.SPARE_BYTES - MARGIN_BYTES - taken

    def grant(self, n_bytes: int) -> int:
        """Let weights make room for up to ``n_bytes`` more; return the bytes that may be taken.

        Without a configured budget nothing is denied: weights make what room they can.
        """
        with self.lock:
            room = self.room()
            granted = n_bytes if room is None else max(0, min(n_bytes, room))
            if granted and self._models:
                try:
                    self.make_room(granted)
                except UnmetBudgetError:  # a batch that just ended took more
                    return n_bytes if room is None else 0
            return granted

    def claims(self) -> list[MemoryClaim]:
        """Return the claims of the streamed weights, or none without a model."""
        with self.lock:
            models = [model for model in self._models.values() if model.seen]
            lent = sum(model.growth_bytes for model in models)
            return self._savings.claims([one.seen for one in models], lent, self._take_rest)

    def _take_rest(self, n_bytes: int) -> None:
        """Keep what others leave, now that they gave memory back or may take more."""
        del n_bytes
        self.enforce(waits=False)

    def refresh(self) -> None:
        """Look which weights are kept now; waits for models that compute."""
        with self.lock:
            self.look()

    def enforce(self, *, waits: bool) -> None:
        """Keep the weights that fit into what others leave now."""
        with self.lock:
            if self._models:
                if waits:
                    self.look()
                    self.share(waits=True)
                else:
                    self._share_or_tell()

    def relieve(self, n_bytes: int = 0) -> None:
        """Let others release what exceeds the budget before something takes ``n_bytes`` more.

        The caller must not hold the lock, which others take when they ask for room.
        """
        room = self.room()
        if room is not None and room < n_bytes:
            process_memory.release(n_bytes - room)

    def make_room(self, n_bytes: int) -> None:
        """Release kept weights before something else takes ``n_bytes`` of memory."""
        with self.lock:
            self.look()
            self.share(n_bytes, waits=True)

    def share(self, n_more: int = 0, *, waits: bool = False) -> None:
        """Give each model its share of the budget.

        Args:
            n_more: Bytes that something else is about to take.
            waits: Whether to wait until models that are computing have released memory.

        Raises:
            UnmetBudgetError: The budget cannot be met.
        """
        models = list(self._models.values())
        found = shares(self.budget, self.others() + n_more, self._needs(models))
        self._looked_at = time.monotonic()
        for model, kept in sorted(zip(models, found, strict=True), key=_change):
            is_whole = kept >= model.seen["bytes"] > model.kept
            if kept < model.kept or kept - model.kept >= _STEP or is_whole:
                self._apply(model, kept, waits=waits)

    def report(self) -> dict[str, Any]:
        """Return the budget, sums over all models, and each model's figures.

        ``unmet`` says why the budget cannot be met. ``needed_bytes`` would have been read
        if each batch had read all weights.
        """
        with self.lock:
            self.look()
            models = list(self._models.values())
            return {
                "memory_budget": self.budget,
                "unmet": self._why_unmet() if models else None,
                "weight_bytes": sum(model.seen["bytes"] for model in models),
                "held_bytes": sum(model.held for model in models),
                "read_bytes": sum(model.seen["read_bytes"] for model in models),
                "needed_bytes": sum(model.n_batches * model.seen["bytes"] for model in models),
                "models": [
                    {"batches": model.n_batches, "tokens": model.n_tokens} | model.seen
                    for model in models
                ],
            }

    def _foreseen_and_taken(self) -> int:
        """Return what first batches have taken so far, which `others` and `needed` both count.

        Figures of weights are those from before: looking at them would wait for the batch.
        """
        models = [model for model in self._models.values() if model.began is not None]
        began = min((model.began for model in models if model.began is not None), default=0)
        foreseen = sum(model.foreseen(self._arena) for model in models)
        return min(foreseen, max(0, process_memory.beside_others() - began))

    def _require(self, budget: int) -> None:
        """Raise ``UnmetBudgetError`` if the current models need more than ``budget``."""
        require(budget, self.others(), process_memory.SPARE_BYTES + self.needed())

    def _why_unmet(self) -> str | None:
        """Return why the budget cannot be met now, so that every weight is streamed, or None."""
        try:
            self._require(self.budget)
        except UnmetBudgetError as error:
            return str(error)
        return None

    def _bytes_of(self, budget: int | None) -> int:
        set_ones = [n for n in (budget, process_memory.budget()) if n is not None]
        return int(min(set_ones)) if set_ones else process_memory.obtainable_bytes()

    def _needs(self, models: list[StreamedModel]) -> list[Needs]:
        return [model.needs(self._arena) for model in models]

    def look(self) -> None:
        """Refresh the figures of all models; waits for models that compute."""
        for model in list(self._models.values()):
            model.look()

    def _apply(self, model: StreamedModel, kept: int, *, waits: bool) -> None:
        model.kept = kept
        with contextlib.suppress(ReferenceError):
            model.is_late = not model.weights.set_memory(kept, self._arena, waits=waits)
        if not model.is_late:
            model.look()

    def _share_or_tell(self) -> None:
        """Share the budget; if it cannot be met, keep no weights and log that once."""
        try:
            self.share()
        except UnmetBudgetError as error:
            for model in list(self._models.values()):
                self._apply(model, 0, waits=False)
            self._looked_at = time.monotonic()
            if not self._is_crowded:
                _log.warning("%s Every weight is streamed until memory is available.", error)
            self._is_crowded = True
        else:
            self._is_crowded = False


def _change(pair: tuple[StreamedModel, int]) -> int:
    """Return the change of a model's memory. Sorted by it, releases come before allocations."""
    model, kept = pair
    return kept - model.kept
