"""HTTP server of ``llmaas serve``: llama_cpp.server's app, with our limits, keys and routes."""

from __future__ import annotations

import contextlib
import importlib

__all__ = ["import_server"]


def import_server() -> None:
    """Import the modules of ``llmaas serve``, so that this process becomes as large as a service.

    Without the ``server`` extra, nothing is imported.
    """
    with contextlib.suppress(ImportError):
        for name in ("application", "http_server", "upstream"):
            importlib.import_module(f"{__name__}.{name}")
