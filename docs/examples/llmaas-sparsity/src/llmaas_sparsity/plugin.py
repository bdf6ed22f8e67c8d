"""The hooks: a tap for every new context, and the share of small values by layer."""

from typing import Any, ClassVar

from llama_cpp import llama_cpp
from llmaas_hooks import NativeContext, hookimpl
from pydantic import BaseModel, ConfigDict, Field

from llmaas_sparsity._tap import ffi, lib

__all__ = ["Sparsity", "SparsityConfig"]


class SparsityConfig(BaseModel):
    """Table ``[plugins.sparsity]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: float = Field(
        default=0.05, ge=0, le=1, description="Small is up to this share of a row's largest value."
    )


class Sparsity:
    """Counts the near-zero inputs of feed-forward blocks."""

    Config: ClassVar[type[SparsityConfig]] = SparsityConfig

    def __init__(self, config: SparsityConfig) -> None:
        """Count nothing yet."""
        self._threshold = config.threshold
        self._counters: dict[int, list[Any]] = {}  # by address of the context

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Tap a new context. The subscription ends with it, so the counters must live as long."""
        n_layer = llama_cpp.llama_model_n_layer(context.model)
        made = lib.sparsity_new(n_layer, self._threshold)
        if made == ffi.NULL:
            raise MemoryError("no memory for the counters of a context")
        counters = ffi.gc(made, lib.sparsity_free)
        self._counters[context.ctx] = [counters, n_layer]  # the address may be a freed context's
        context.subscribe(int(ffi.cast("uintptr_t", lib.sparsity_tap(counters))))

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """The share of each layer, of every context that was made; None where nothing was read."""
        return {"contexts": [_shares(*counted) for counted in list(self._counters.values())]}

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Drop the counters: by now every subscription has ended."""
        self._counters.clear()


def _shares(counters: Any, n_layer: int) -> list[float | None]:
    n_small, n_all = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    shares = []
    for i in range(n_layer):
        lib.sparsity_read(counters, i, n_small, n_all)
        shares.append(n_small[0] / n_all[0] if n_all[0] else None)
    return shares
