"""Which contexts the plugin serves; the others stay exactly vanilla."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp

__all__ = ["SCRATCH_SEQUENCE", "SEQUENCES", "unsupported"]

SCRATCH_SEQUENCE = 1
"""Sequence through which ranges of cells are read and written; empty between calls."""
SEQUENCES = 2
"""The app's sequence 0, and the scratch one."""


def unsupported(model: int, params: Any) -> str | None:
    """Why a context must be left alone, or None.

    Args:
        model: Address of the ``llama_model``.
        params: The ``llama_context_params`` the app asks for.
    """
    swa = llama_cpp.llama_model_n_swa(model)
    reasons = {
        "recurrent model: its state cannot drop ranges": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model: its state cannot drop ranges": llama_cpp.llama_model_is_hybrid(model),
        "diffusion model: it has no causal cells": llama_cpp.llama_model_is_diffusion(model),
        "encoder model: its cells do not extend": llama_cpp.llama_model_has_encoder(model),
        f"sliding window of {swa} tokens: old cells are gone": swa > 0,
        "embedding context": bool(params.embeddings),
        f"{params.n_seq_max} sequences of the app's own": params.n_seq_max > 1,
        "2-D positions (M-RoPE)": _has_2d_positions(model),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_2d_positions(model: int) -> bool:
    """M-RoPE and its kin (vision, interleaved) have the highest type numbers, from MROPE on."""
    return int(llama_cpp.llama_model_rope_type(model)) >= llama_cpp.LLAMA_ROPE_TYPE_MROPE
