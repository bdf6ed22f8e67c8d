"""Fingerprint of everything that determines hidden states, which ties a datastore to its model.

KV cache types and flash attention are left out: they change a state only by rounding.
"""

from __future__ import annotations

from typing import Any

from llmaas_hooks import ModelLoad
from llmaas_plugins.model.identity import hashed, load_of, state_identity

__all__ = ["fingerprint"]

_FORMAT = 2


def fingerprint(llama: Any, load: ModelLoad | None = None) -> bytes:
    """Return a 32-byte fingerprint of the model of ``llama`` (a ``llama_cpp.Llama``) as used there.

    Args:
        llama: The ``Llama``.
        load: How the model was opened. If it is unknown, the model's current files are assumed.

    Raises:
        StoreError: It is unknown which model was loaded.
    """
    values = state_identity(llama, load or load_of(llama))
    return hashed({"format": _FORMAT, **(values or {})})
