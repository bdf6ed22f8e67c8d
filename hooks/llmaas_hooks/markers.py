"""The two pluggy markers, apart so that ``specs`` and plugins import no manager."""

from __future__ import annotations

import pluggy

__all__ = ["NAME", "hookimpl", "hookspec"]

NAME = "llmaas"
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)
