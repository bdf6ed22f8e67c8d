"""Sizes of a new context's cells."""

from __future__ import annotations

from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate

__all__ = ["all_cell_bytes", "cell_bytes", "n_ctx_of"]


def n_ctx_of(create: ContextCreate) -> int:
    """Return the number of cells of a new context."""
    return int(create.params.n_ctx) or int(llama_cpp.llama_model_n_ctx_train(create.model))


def all_cell_bytes(create: ContextCreate) -> int:
    """Estimate the bytes of a new context's cells, assuming that all layers are alike."""
    model = create.model
    n_embd, n_head = llama_cpp.llama_model_n_embd(model), llama_cpp.llama_model_n_head(model)
    width = llama_cpp.llama_model_n_head_kv(model) * n_embd // max(1, n_head)
    n_values = llama_cpp.llama_model_n_layer(model) * width * n_ctx_of(create)
    return int(n_values * cell_bytes(create.params))


def cell_bytes(params: Any) -> float:
    """Return the bytes of one key value and one value value together."""
    sizes = (GGML_QUANT_SIZES[GGMLQuantizationType(int(t))] for t in (params.type_k, params.type_v))
    return sum(n_bytes / n_values for n_values, n_bytes in sizes)
