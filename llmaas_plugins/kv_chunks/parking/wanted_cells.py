"""How many tokens of inactive contexts an engine's spare cells are made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_cpp import llama_cpp

from llmaas_plugins import process_memory
from llmaas_plugins.machine import resident_bytes
from llmaas_plugins.model.cell_sizes import all_cell_bytes, n_ctx_of, token_bytes

if TYPE_CHECKING:
    from llmaas_hooks import ContextCreate
    from llmaas_plugins.kv_chunks.config import KVChunksConfig

__all__ = ["wanted_tokens"]

_CONTEXTS = 3
"""Inactive contexts that get cells if the user named no number."""
_SHARE = 0.25
"""Most of the free memory that may be needed for the cells; the RAM tier holds more with it."""
_SCORE_BYTES = 4


def wanted_tokens(create: ContextCreate, config: KVChunksConfig) -> int:
    """Return how many tokens of inactive contexts should stay in the cells of a new context.

    With a memory budget, contexts stay there without being asked for, but not with a lossless
    codec: in a cache with other contexts, last bits of sums can differ. llama.cpp writes all cells
    when it makes them, so they must fit at that moment, and without flash attention a batch can
    need a score for each cell, query and head. A model whose weights are streamed needs that memory
    itself.
    """
    if _is_asked(config):
        return config.parked_tokens or 0
    room = process_memory.room()
    if not _parks_by_itself(config) or room is None:
        return 0
    if resident_bytes() < llama_cpp.llama_model_size(create.model):
        return 0
    own, each = all_cell_bytes(create), token_bytes(create.model, create.params)
    fitting = _SHARE * (room - own) / (each + _score_bytes(create))
    return max(0, min(_CONTEXTS * n_ctx_of(create), int(fitting)))


def _score_bytes(create: ContextCreate) -> int:
    """Return the bytes that a batch may need for each cell."""
    params = create.params
    is_flash = params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    n_rows = 1 if is_flash else int(llama_cpp.llama_model_n_head(create.model))
    return _SCORE_BYTES * n_rows * (int(params.n_ubatch) or int(params.n_batch))


def _is_asked(config: KVChunksConfig) -> bool:
    return config.parked_tokens is not None


def _parks_by_itself(config: KVChunksConfig) -> bool:
    return config.codec != "lossless" and process_memory.budget() is not None
