"""The LoRA adapter that an app gave to its ``Llama``, in other contexts of the same model."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import LlmaasError

__all__ = ["use_adapter_of"]


def use_adapter_of(llama: Any, ctx: Any) -> None:
    """Let a context compute with the adapter of ``Llama(lora_path=…)``, if it has one.

    Adapters that the app sets by other calls are unknown; ``Engine.alteration`` names such a call.

    Args:
        llama: The ``llama_cpp.Llama``.
        ctx: Another ``llama_context`` of its model.

    Raises:
        LlmaasError: llama.cpp refuses the adapter.
    """
    adapter = getattr(llama, "_lora_adapter", None)
    if adapter is None:
        return
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    scales = (ctypes.c_float * 1)(llama.lora_scale)
    if llama_cpp.llama_set_adapters_lora(ctx, adapters, 1, scales):
        raise LlmaasError(f"cannot use adapter {llama.lora_path} in a second context")
