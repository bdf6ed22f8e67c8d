"""Collect everything that decides the bytes of KV cells and hidden states.

``COUNTED`` names each setting of llama.cpp that changes cells or states. ``LEFT_OUT`` names every
other setting, with the reason. A test compares both with the parameters of the installed
llama-cpp-python, so that no setting of a new release is overlooked. docs/explanation/internals.md
has the same as a table.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp as package
from llama_cpp import llama_cpp

from llmaas_hooks import LlmaasError, ModelFile, ModelLoad, StoreError
from llmaas_plugins.model.digest import begin_digest, files_now
from llmaas_plugins.model.gguf_header import read_outline

__all__ = [
    "COUNTED",
    "LEFT_OUT",
    "cell_identity",
    "hashed",
    "is_rotation_off",
    "load_of",
    "may_have_long_factors",
    "metadata",
    "rope_switch",
    "state_identity",
]

_ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_STATES = (*_ROPE, "attention_type", "ctx_type")
_CELLS = ("type_k", "type_v", "flash_attn_type", "swa_full")
_LAYOUTS = {2: 3}
"""Versions of sequence states, and later versions with the same layout of stored cells."""

COUNTED: Mapping[str, str] = {
    "Llama.model_path": "digest over every byte of every split, of the files that were loaded",
    "Llama.kv_overrides": "the values that llama.cpp was given",
    "model.kv_overrides": "as `Llama.kv_overrides`",
    "Llama.lora_path": "digest of the file that was loaded",
    "Llama.lora_scale": "with an adapter",
    "Llama.n_ctx": "whether a model with two sets of RoPE factors uses the second; nothing else "
    "depends on it",
    "context.n_ctx": "as `Llama.n_ctx`",
    **{f"Llama.{name}": "RoPE" for name in _ROPE},
    **{f"context.{name}": "RoPE" for name in _ROPE},
    "Llama.attention_type": "which tokens a token sees",
    "context.attention_type": "as `Llama.attention_type`",
    "context.ctx_type": "which layers a context computes",
    "model.load_mtp": "whether layers that predict further tokens have cells",
    "Llama.type_k": "cells only: the type that keys are stored in",
    "context.type_k": "as `Llama.type_k`",
    "Llama.type_v": "cells only: the type that values are stored in",
    "context.type_v": "as `Llama.type_v`",
    "Llama.flash_attn": "cells only: whether values are stored transposed",
    "context.flash_attn_type": "as `Llama.flash_attn`",
    "Llama.swa_full": "cells only: which cells there are with a sliding window",
    "context.swa_full": "as `Llama.swa_full`",
    "environment.LLAMA_ATTN_ROT_DISABLE": "cells only: whether quantized keys and values are "
    "rotated, as it was when the context was made",
}
_REASONS: Mapping[str, tuple[str, ...]] = {
    "changes results by rounding only": (
        *("Llama.n_batch", "Llama.n_ubatch", "Llama.n_threads", "Llama.n_threads_batch"),
        *("context.n_batch", "context.n_ubatch", "context.n_threads", "context.n_threads_batch"),
        *("model.use_extra_bufts", "Llama.logits_all", "Llama.draft_model"),
    ),
    "where it is computed: rounding only, and contexts on a GPU are not served": (
        *("Llama.n_gpu_layers", "Llama.split_mode", "Llama.main_gpu", "Llama.tensor_split"),
        *("Llama.offload_kqv", "Llama.op_offload", "Llama.numa"),
        *("model.n_gpu_layers", "model.split_mode", "model.main_gpu", "model.tensor_split"),
        *("model.devices", "model.no_host", "model.tensor_buft_overrides"),
        *("context.offload_kqv", "context.op_offload"),
    ),
    "how the file is read, not what is in it": (
        *("Llama.use_mmap", "Llama.use_mlock"),
        *("model.load_mode", "model.lazy_mode", "model.check_tensors"),
    ),
    "no context without weights": ("Llama.vocab_only", "model.vocab_only", "model.no_alloc"),
    "a callback that only observes, which `Llama` never sets": (
        *("model.progress_callback", "model.progress_callback_user_data"),
        *("context.cb_eval", "context.cb_eval_user_data"),
        *("context.abort_callback", "context.abort_callback_data"),
    ),
    "where cells lie, not what is in them": (
        *("context.n_seq_max", "context.kv_unified", "context.defrag_thold"),
    ),
    "of contexts that are not served: recurrent, embedding, or of two models": (
        *("context.n_rs_seq", "context.ctx_other", "Llama.embedding", "context.embeddings"),
        *("Llama.pooling_type", "context.pooling_type"),
    ),
    "logits and sampling only": (
        *("context.n_outputs_max", "context.n_outputs_max_per_seq"),
        *("context.samplers", "context.n_samplers", "Llama.seed", "Llama.last_n_tokens_size"),
    ),
    "which tokens a prompt has; cells are found by tokens": (
        *("Llama.chat_format", "Llama.chat_handler", "Llama.tokenizer", "Llama.spm_infill"),
    ),
    "logging, measuring, or no effect": (
        *("Llama.verbose", "Llama.no_perf", "context.no_perf", "Llama.lora_base", "Llama.kwargs"),
    ),
}
LEFT_OUT: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}


def state_identity(
    llama: Any, load: ModelLoad, wait_s: float | None = None
) -> dict[str, Any] | None:
    """Return what decides the hidden states of a model, as JSON types.

    Args:
        llama: The ``llama_cpp.Llama``.
        load: How its model was opened.
        wait_s: Most seconds to wait for digests; None waits until they are known.

    Returns:
        The identity, or None if the digests take longer.

    Raises:
        StoreError: It is unknown which files were loaded.
    """
    digests = {"model": begin_digest(load.files)}
    if llama.lora_path:
        if not load.adapters:
            raise StoreError(f"cannot tell which adapter {llama.lora_path} is. Load it again.")
        # Other adapters are the app's own; they count as an alteration of the model.
        digests["lora"] = begin_digest(load.adapters[:1])
    found = {name: digest.get(wait_s) for name, digest in digests.items()}
    if None in found.values():
        return None
    params = llama.context_params
    return {
        **found,
        "lora_scale": float(llama.lora_scale) if llama.lora_path else None,
        "kv_overrides": {key: repr(value) for key, value in sorted(load.overrides.items())},
        "has_long_factors": _has_long_factors(llama, load),
        "n_ctx_train": llama_cpp.llama_model_n_ctx_train(llama.model),
        "load_mtp": bool(load.params.load_mtp),
        **{name: getattr(params, name) for name in _STATES},
    }


def cell_identity(
    llama: Any, load: ModelLoad, *, rotation_off: bool, wait_s: float | None = None
) -> dict[str, Any] | None:
    """Return what decides the bytes of KV cells, as JSON types.

    Args:
        llama: The ``llama_cpp.Llama``.
        load: How its model was opened.
        rotation_off: Value of ``is_rotation_off`` when the context was created.
        wait_s: Most seconds to wait for digests; None waits until they are known.

    Returns:
        The identity, or None if the digests take longer.

    Raises:
        StoreError: It is unknown which files were loaded.
    """
    states = state_identity(llama, load, wait_s)
    if states is None:
        return None
    version = int(package.LLAMA_STATE_SEQ_VERSION)
    return {
        **states,
        "state_version": _LAYOUTS.get(version, version),
        "rotation_off": rotation_off,
        **{name: getattr(llama.context_params, name) for name in _CELLS},
    }


def hashed(values: Mapping[str, Any]) -> bytes:
    """Return a hash of an identity, 32 bytes."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def is_rotation_off() -> bool:
    """Return whether the environment turns off the rotation of quantized cells in new contexts."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))
    return number is not None and int(number[0]) != 0


def load_of(llama: Any) -> ModelLoad:
    """Return how a ``Llama`` that was created without the suite may have been opened.

    The result names the files that exist now, so call it only right after loading.
    """
    adapters = list(files_now(llama.lora_path)) if llama.lora_path else []
    files = files_now(llama.model_path)
    return ModelLoad(
        llama.model_path, llama.model_params, files, llama.kv_overrides or {}, adapters
    )


def rope_switch(model: int, load: ModelLoad | None) -> int:
    """Return the context length beyond which a model uses its second RoPE factors, if it has any.

    Args:
        model: Address of the ``llama_model``.
        load: How the model was opened; None if that is unknown.
    """
    overrides: Mapping[str, Any] = {} if load is None else load.overrides
    arch = metadata(model, "general.architecture")
    for key in (f"{arch}.rope.scaling.original_context_length", f"{arch}.context_length"):
        value = overrides.get(key, metadata(model, key))
        if str(value).isdecimal():
            return int(value)
    return int(llama_cpp.llama_model_n_ctx_train(model))


def may_have_long_factors(load: ModelLoad | None) -> bool:
    """Return whether a model may have two sets of RoPE factors; if unknown, return True."""
    return load is None or not load.files or any(map(_names_long_factors, load.files))


def metadata(model: int, key: str) -> str:
    """Return a value of the model's metadata, or an empty string if the key is missing."""
    value = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode(errors="replace")


def _has_long_factors(llama: Any, load: ModelLoad) -> bool:
    """Return whether a context uses the second set of RoPE factors."""
    is_long = llama_cpp.llama_n_ctx_seq(llama.ctx) > rope_switch(int(llama.model), load)
    return bool(is_long) and may_have_long_factors(load)


@functools.lru_cache(maxsize=64)
def _names_long_factors(file: ModelFile) -> bool:
    try:
        names = read_outline(Path(file.path)).shapes
    except LlmaasError:
        return True
    is_same = files_now(file.path)[0].stamp == file.stamp
    return not is_same or any("rope_factors_long" in name for name in names)
