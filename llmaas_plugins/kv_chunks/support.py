"""Which contexts the plugin serves; the others stay exactly vanilla."""

from __future__ import annotations

from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate, ModelLoad

__all__ = ["SCRATCH_SEQUENCE", "SEQUENCES", "unsupported", "unsupported_cells"]

_EMPTY_BLOB_BYTES = 16

SCRATCH_SEQUENCE = 1
"""Sequence through which ranges of cells are read and written; empty between calls."""
SEQUENCES = 2
"""The app's sequence 0, and the scratch one."""


def unsupported(create: ContextCreate) -> str | None:
    """Why a context that is about to be made must be left alone, or None."""
    model, params = create.model, create.params
    swa = llama_cpp.llama_model_n_swa(model)
    reasons = {
        "recurrent model: its state cannot drop ranges": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model: its state cannot drop ranges": llama_cpp.llama_model_is_hybrid(model),
        "diffusion model: it has no causal cells": llama_cpp.llama_model_is_diffusion(model),
        "encoder model: its cells do not extend": llama_cpp.llama_model_has_encoder(model),
        f"sliding window of {swa} tokens: its cells are kept in two caches": swa > 0,
        "embedding context": bool(params.embeddings),
        f"{params.n_seq_max} sequences of the app's own": params.n_seq_max > 1,
        "2-D positions (M-RoPE)": _has_2d_positions(model),
        "layers are offloaded to a GPU: not tested with one": _is_offloaded(create.load),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def unsupported_cells(ctx: int) -> str | None:
    """Why a new context must be left alone after all, or None: seen from how it keeps its cells.

    One cache of keys and values is a blob of 16 bytes while it is empty. Architectures that keep
    more, an index for instance, or nothing, cannot be told from the model alone.
    """
    if llama_cpp.llama_get_memory(ctx) is None:
        return "encoder or diffusion model: it keeps no cells"
    if llama_cpp.llama_state_seq_get_size(ctx, SCRATCH_SEQUENCE) != _EMPTY_BLOB_BYTES:
        return "its cells are not in one cache of keys and values"
    return None


def _is_offloaded(load: ModelLoad | None) -> bool:
    """Unknown counts as offloaded, where it could be."""
    if not llama_cpp.llama_supports_gpu_offload():
        return False
    return load is None or load.params.n_gpu_layers != 0


def _has_2d_positions(model: int) -> bool:
    """M-RoPE and its kin (vision, interleaved) have the highest type numbers, from MROPE on."""
    return int(llama_cpp.llama_model_rope_type(model)) >= llama_cpp.LLAMA_ROPE_TYPE_MROPE
