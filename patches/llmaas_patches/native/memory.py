"""Memory that engines need themselves: weights and cells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from llama_cpp import llama_cpp

from llmaas_hooks import MemoryClaim
from llmaas_patches.native.backend_context import BackendContext

__all__ = ["engine_memory"]


def engine_memory(contexts: Iterable[BackendContext]) -> list[MemoryClaim]:
    """Return claims of the weights that are in memory as a whole, and of the contexts' own cells.

    Mapped weights are left out, because the system decides how many of them are in memory.
    """
    weights: dict[int, int] = {}
    cells = 0
    for context in contexts:
        with contextlib.suppress(ReferenceError), context.alive():  # else freed meanwhile
            cells += _own_cell_bytes(context)
            if _is_read(context):
                n_bytes = int(llama_cpp.llama_model_size(context.model))
                weights[context.model] = max(0, n_bytes - context.streamed_bytes)
    found = [
        MemoryClaim.reserved("weights", sum(weights.values()), "every token is computed with them"),
        MemoryClaim.reserved("cells of contexts", cells, "every token attends to them"),
    ]
    return [claim for claim in found if claim.held]


def _is_read(context: BackendContext) -> bool:
    load = context.load
    return load is not None and load.params.load_mode == llama_cpp.LLAMA_LOAD_MODE_NONE


def _own_cell_bytes(context: BackendContext) -> int:
    """Return the bytes in use of a context's cells, without those that plugins added."""
    cells = context.cells()
    n_own = min(cells.n, int(llama_cpp.llama_n_ctx(context.ctx)))  # which hides added cells
    return min(cells.touched_bytes, cells.n_bytes // max(1, cells.n) * n_own)
