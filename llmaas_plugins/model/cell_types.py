"""Types of the engine's KV cells."""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["needs_flash_attention"]


def needs_flash_attention(type_v: int | None) -> bool:
    """Return whether llama.cpp needs flash attention for values of a type: for quantized ones.

    Args:
        type_v: Number of a ggml type; None for the default. Unknown numbers need none.
    """
    try:
        n_values, _ = GGML_QUANT_SIZES[GGMLQuantizationType(0 if type_v is None else type_v)]
    except ValueError:
        return False
    return n_values > 1
