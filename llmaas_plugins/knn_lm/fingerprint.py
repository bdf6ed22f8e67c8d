"""What decides hidden states: a datastore serves only the model that made its keys.

Types of KV cells and flash attention are left out: they change a state by rounding only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from llmaas_plugins.model_digest import model_identity

__all__ = ["fingerprint"]

_FORMAT = 1


def fingerprint(llama: Any) -> bytes:
    """32 bytes that name the model of ``llama`` (a ``llama_cpp.Llama``) as it is used there."""
    values = {"format": _FORMAT, **model_identity(llama)}
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
