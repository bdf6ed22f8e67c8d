"""What decides hidden states: a datastore serves only the model that made its keys.

Types of KV cells and flash attention are left out: they change a state by rounding only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from llmaas_plugins.model_digest import file_digest

__all__ = ["fingerprint"]

_FORMAT = 1
_CONTEXT_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


def fingerprint(llama: Any) -> bytes:
    """32 bytes that name the model of ``llama`` (a ``llama_cpp.Llama``) as it is used there."""
    values = {
        "format": _FORMAT,
        "model": file_digest(llama.model_path),
        "kv_overrides": repr(llama.kv_overrides),
        "lora": file_digest(llama.lora_path) if llama.lora_path else None,
        "lora_scale": llama.lora_scale if llama.lora_path else None,
        **{name: getattr(llama.context_params, name) for name in _CONTEXT_FIELDS},
    }
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
