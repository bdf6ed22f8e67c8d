"""A streamed model: its contexts, and the memory that it takes and needs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from llama_cpp import llama_cpp

from llmaas_hooks import FileWeights, NativeContext
from llmaas_plugins.flash_weights.memory import Needs
from llmaas_plugins.flash_weights.savings import Seen, WeightSavings

__all__ = ["StreamedModel", "untouched_bytes"]

_HELD = ("kept_bytes", "prompt_kept_bytes", "arena_bytes", "passing_bytes")


@dataclass(slots=True)
class StreamedModel:
    """Streamed model.

    Attributes:
        savings: Time that kept weights of all models save.
        contexts: Contexts of the model, by address.
        growth: Bytes of compute buffers that each context without a batch so far will touch.
        beside: Other bytes that such a context will take at its first batch.
        began: Bytes of the process, without what others hold, when the request with the first batch
            began; None before, and when that batch has ended.
        kept: Bytes that the model may take for kept weights and growth.
        is_late: Whether the model still keeps more, because it was computing.
        seen: Figures when the model was last looked at. They are not refreshed while it computes,
            because that would wait.
        untouched: Bytes of compute buffers that contexts have not touched yet, when last looked at.
        n_batches: Number of batches so far.
        n_tokens: Number of tokens in these batches.
    """

    savings: WeightSavings
    contexts: dict[int, NativeContext] = field(default_factory=dict)
    growth: dict[int, int] = field(default_factory=dict)
    beside: dict[int, int] = field(default_factory=dict)
    began: int | None = None
    kept: int = 0
    is_late: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    untouched: int = 0
    n_batches: int = 0
    n_tokens: int = 0
    _told: Seen | None = None  # before that, another context of the model may have computed

    @property
    def weights(self) -> FileWeights:
        """Streamed weights of the model, which all its contexts share."""
        return next(iter(self.contexts.values())).file_weights()

    @property
    def held(self) -> int:
        """Bytes that the weights take in memory, as last seen; 0 before that."""
        return sum(self.seen.get(name, 0) for name in _HELD)

    @property
    def growth_bytes(self) -> int:
        """Bytes of compute buffers and cells that no batch has touched yet."""
        return self.untouched + sum(self.growth.values())

    def look(self) -> None:
        """Refresh the figures of the weights, and the untouched bytes of the contexts."""
        with contextlib.suppress(ReferenceError):  # the garbage collector freed a context meanwhile
            self.seen = self.weights.stats()
            names = "stalled_ns", "passes", "prompt_used_bytes"
            seen = Seen(*(self.seen[name] for name in names))
            if self._told is not None:
                self.savings.saw(self._told, seen, self.seen)
            self._told = seen
            self.untouched = sum(
                untouched_bytes(context)
                for ctx, context in list(self.contexts.items())
                if ctx not in self.growth
            )

    def foreseen(self, arena: int) -> int:
        """Return the bytes that the first batch may take, of weights and of all else."""
        kept = self.seen["kept_bytes"] + self.seen["prompt_kept_bytes"]
        most = self.seen["bytes"] + self.seen["prompt_bytes"]
        weights = max(0, min(self.kept, most) - kept)
        weights += max(0, arena - self.seen["arena_bytes"])
        return weights + self.growth_bytes + sum(self.beside.values())

    def needs(self, arena: int) -> Needs:
        """Return the model's memory needs with an arena of this size."""
        passing = max(arena, self.seen["arena_bytes"]) + self.seen["passing_bytes"]
        passing += sum(self.beside.values())
        least = self.seen["least_bytes"]
        prompts = self.seen["prompt_bytes"]
        return Needs(self.seen["bytes"], least, passing, self.growth_bytes, prompts)


def untouched_bytes(context: NativeContext) -> int:
    """Return the bytes that a context may touch without asking: its buffers and the app's cells.

    Whoever added cells to those of the app asks for their memory before using it.
    """
    cells, n_bytes = context.cells(), context.untouched_bytes()
    if not cells.n:
        return n_bytes
    n_added = max(0, cells.n - int(llama_cpp.llama_n_ctx(context.ctx)))  # which hides added cells
    added_bytes = n_added * (cells.n_bytes // cells.n)
    n_touched = max(0, cells.touched_bytes - (cells.n_bytes - added_bytes))
    return max(0, n_bytes - max(0, added_bytes - n_touched))
