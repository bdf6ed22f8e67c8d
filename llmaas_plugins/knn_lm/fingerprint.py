"""What decides hidden states: a datastore serves only the model that made its keys.

Types of KV cells and flash attention are left out: they change a state by rounding only.
"""

from __future__ import annotations

from typing import Any

from llmaas_hooks import ModelLoad
from llmaas_plugins.model_identity import hashed, load_of, state_identity

__all__ = ["fingerprint"]

_FORMAT = 2


def fingerprint(llama: Any, load: ModelLoad | None = None) -> bytes:
    """Return 32 bytes that name the model of ``llama`` (a ``llama_cpp.Llama``) as it is used there.

    Args:
        llama: The ``Llama``.
        load: How its model was opened; without that, its files are taken to be those that are
            there now.

    Raises:
        StoreError: Nobody knows what was loaded.
    """
    values = state_identity(llama, load or load_of(llama))
    return hashed({"format": _FORMAT, **(values or {})})
