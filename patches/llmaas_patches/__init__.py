"""The interceptors: the only code that touches llama_cpp's internals.

``install`` patches the entry points of the installed llama-cpp-python and fires the hooks of one
``HookManager``; ``Installed.revert`` puts back exactly what was there.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import Llama

from llmaas_hooks import HookManager
from llmaas_patches.compat import TESTED_VERSIONS, VERSION_RANGE, check_version
from llmaas_patches.host import Host
from llmaas_patches.patcher import Applied, apply
from llmaas_patches.scope import in_its_blocks, serving_app, serving_context, without
from llmaas_patches.table import PATCHES

__all__ = [
    "TESTED_VERSIONS",
    "VERSION_RANGE",
    "Installed",
    "in_its_blocks",
    "install",
    "serving_app",
    "serving_context",
    "without",
]


class Installed:
    """Patches of one activation."""

    def __init__(self, host: Host, applied: Applied) -> None:
        """Keep what ``install`` made."""
        self._host = host
        self._applied = applied

    def targets(self) -> list[str]:
        """Dotted names of what is patched now."""
        return self._applied.targets()

    def native(self) -> dict[str, Any] | None:
        """Counters of the contexts on the native backend; None: no plugin needs it."""
        return None if self._host.native is None else self._host.native.report()

    def n_said(self, llama: Llama) -> int:
        """Return the tokens in a context, less those that a draft model only proposed."""
        return self._host.n_said(llama)

    def settle(self) -> None:
        """Wait until deferred work on every engine is done."""
        for handle in list(self._host.lanes.pending):
            self._host.lanes.settle(handle)

    def revert(self) -> None:
        """Finish deferred work and put every original back; idempotent."""
        self._host.silence.end()
        self.settle()
        _close(self._host)
        self._applied.revert()
        self._host.collecting.stop()


def install(hooks: HookManager) -> Installed:
    """Patch llama_cpp for the plugins of ``hooks``.

    Raises:
        IncompatibleError: The installed llama-cpp-python is not one the patches know; then
            nothing was patched.
    """
    check_version()
    host = Host(hooks)
    try:
        applied = apply(PATCHES, host)
    except BaseException:
        _close(host)
        raise
    host.collecting.start()
    return Installed(host, applied)


def _close(host: Host) -> None:
    """Let go of the engine and end the lane, before the wrappers that wait for it are gone."""
    if host.native is not None:
        host.native.close()
    host.lanes.close()
