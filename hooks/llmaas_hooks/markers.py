"""The two pluggy markers, in a module of their own: ``specs`` and plugins need no manager."""

from __future__ import annotations

import pluggy

__all__ = ["NAME", "hookimpl", "hookspec"]

NAME = "llmaas"
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)
