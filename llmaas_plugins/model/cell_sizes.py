"""Sizes of a context's cells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate
from llmaas_plugins.model.identity import metadata

__all__ = [
    "CELL_STEP",
    "all_cell_bytes",
    "cell_bytes",
    "n_ctx_of",
    "token_bytes",
    "values_in_cells",
]

CELL_STEP = 256
"""llama.cpp rounds the cells of a context, and those of a graph, up to a multiple of this."""
_BF16, _MXFP4 = 30, 39
_BLOCKS = {
    llama_cpp.GGML_TYPE_F16: (1, 2),
    _BF16: (1, 2),
    llama_cpp.GGML_TYPE_Q8_0: (32, 34),
    llama_cpp.GGML_TYPE_Q5_0: (32, 22),
    llama_cpp.GGML_TYPE_Q5_1: (32, 24),
    llama_cpp.GGML_TYPE_Q4_0: (32, 18),
    llama_cpp.GGML_TYPE_Q4_1: (32, 20),
    llama_cpp.GGML_TYPE_IQ4_NL: (32, 18),
    _MXFP4: (32, 17),
}
"""Values and bytes per block, by type of the cells. Importing gguf for it would take megabytes."""
_UNKNOWN_BLOCK = 1, 4  # F32 and unknown types
_KEYS = re.compile(r"blk\.\d+\.(attn_[kv]|attn_kv_a_mqa|indexer\.attn_k)\.weight")
_MERGED = re.compile(r"blk\.\d+\.attn_qkv\.weight")


def n_ctx_of(create: ContextCreate) -> int:
    """Return the number of cells of a new context."""
    return int(create.params.n_ctx) or int(llama_cpp.llama_model_n_ctx_train(create.model))


def all_cell_bytes(create: ContextCreate) -> int:
    """Estimate the bytes of a new context's cells, assuming that all layers are alike."""
    return n_ctx_of(create) * token_bytes(create.model, create.params)


def token_bytes(model: int, params: Any) -> int:
    """Estimate the bytes of a context's cell, assuming that all layers are alike."""
    arch = metadata(model, "general.architecture")
    n_head = max(1, llama_cpp.llama_model_n_head(model))
    by_default = llama_cpp.llama_model_n_embd(model) // n_head
    n_bytes = 0
    for name, kind in (("key", params.type_k), ("value", params.type_v)):
        n_values, block_bytes = _BLOCKS.get(kind, _UNKNOWN_BLOCK)
        width = int(metadata(model, f"{arch}.attention.{name}_length") or by_default)
        n_bytes += llama_cpp.llama_model_n_head_kv(model) * width * block_bytes // n_values
    return max(1, llama_cpp.llama_model_n_layer(model) * n_bytes)


def cell_bytes(params: Any) -> float:
    """Return the bytes of one key value and one value value together."""
    blocks = (_BLOCKS.get(kind, _UNKNOWN_BLOCK) for kind in (params.type_k, params.type_v))
    return sum(n_bytes / n_values for n_values, n_bytes in blocks)


def values_in_cells(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many numbers keys and values have in the cell of a token.

    Args:
        shapes: Shapes of a model's tensors by name, columns first.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    apart = sum(shape[1] for name, shape in matrices.items() if _KEYS.fullmatch(name))
    merged = (shape for name, shape in matrices.items() if _MERGED.fullmatch(name))
    return apart + sum(shape[1] - shape[0] for shape in merged)
