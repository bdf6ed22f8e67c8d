"""What decides the bytes in KV cells: equal fingerprints mean interchangeable chunks.

llama.cpp's own state reader checks layer count, types and row sizes. It does not check weights,
adapters, RoPE scaling or KV rotation, so all of those are in here; a difference is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import llama_cpp

from llmaas_plugins.model_digest import model_identity

__all__ = ["fingerprint", "root_key"]

_FORMAT = 1
_CELL_FIELDS = ("type_k", "type_v", "flash_attn_type", "attention_type", "swa_full")


def fingerprint(llama: Any) -> dict[str, Any]:
    """Everything about ``llama`` (a ``llama_cpp.Llama``) that its cells' bytes depend on."""
    beyond_training = llama.n_ctx() > llama_cpp.llama_model_n_ctx_train(llama.model)
    return {
        "format": _FORMAT,
        "llama_cpp": llama_cpp.__version__,
        "state_version": llama_cpp.LLAMA_STATE_SEQ_VERSION,
        "beyond_training": beyond_training,  # some RoPE variants switch factors there
        "rotation_off": os.environ.get("LLAMA_ATTN_ROT_DISABLE"),
        **model_identity(llama),
        **{name: getattr(llama.context_params, name) for name in _CELL_FIELDS},
    }


def root_key(values: dict[str, Any]) -> bytes:
    """32-byte hash of a fingerprint: the root of its chunk chains."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
