"""Plugins that turn any llama-cpp-python app into an LLM service for a small machine.

    import llmaas_plugins
    from llama_cpp import Llama

    with llmaas_plugins.activate("llmaas.toml"):
        llm = Llama("model.gguf", n_ctx=4096)
        ...                                  # unchanged app code

Importing this package does nothing: no patch, no plugin, no thread, no file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmaas_plugins.activation import Suite, activate, active_suite, without
    from llmaas_plugins.config import Config, load_config

__all__ = [
    "Config",
    "Suite",
    "__version__",
    "activate",
    "active_suite",
    "load_config",
    "without",
]

__version__ = "0.1.0"

_MODULES = {
    "Config": "config",
    "Suite": "activation",
    "activate": "activation",
    "active_suite": "activation",
    "load_config": "config",
    "without": "activation",
}


def __getattr__(name: str) -> object:
    """Import names on first use, so that the command `llmaas` can handle Ctrl-C while importing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
