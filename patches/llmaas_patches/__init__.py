"""Patches of llama-cpp-python: the only code that touches llama_cpp's internals.

``install`` patches the entry points of the installed llama-cpp-python, which then call the hooks of
one ``HookManager``. ``Installed.revert`` restores the original functions.
"""

from __future__ import annotations

import contextlib
from typing import Any

from llama_cpp import Llama

from llmaas_hooks import HookManager, MemoryClaim
from llmaas_patches.compat import TESTED_VERSIONS, VERSION_RANGE, check_version
from llmaas_patches.host import Host
from llmaas_patches.patcher import Applied
from llmaas_patches.table import PATCHES

__all__ = [
    "TESTED_VERSIONS",
    "VERSION_RANGE",
    "Installed",
    "install",
]


class Installed:
    """Installed patches of one activation."""

    def __init__(self, host: Host, applied: Applied) -> None:
        """Take over the host and the applied patches from ``install``."""
        self._host = host
        self._applied = applied

    def apply(self) -> None:
        """Watch the garbage collector and patch llama_cpp.

        Raises:
            IncompatibleError: The patches do not support the installed llama-cpp-python; nothing
                was patched.
        """
        self._host.collecting.start()
        self._applied.apply(PATCHES, self._host)

    def targets(self) -> list[str]:
        """Return the dotted names of all patched functions."""
        return self._applied.targets()

    def native(self) -> dict[str, Any] | None:
        """Return counters of the contexts on the native backend; None if no plugin needs it."""
        return None if self._host.native is None else self._host.native.report()

    def memory(self) -> list[MemoryClaim]:
        """Return the memory that engines need; empty if no plugin needs the native backend."""
        return [] if self._host.native is None else self._host.native.memory()

    def n_said(self, llama: Llama) -> int:
        """Return the number of tokens in a context, without a draft model's mere proposals."""
        return self._host.n_said(llama)

    def settle(self) -> None:
        """Wait until deferred work on every engine is done."""
        for handle in list(self._host.background.pending):
            self._host.background.settle(handle)

    def is_collecting(self) -> bool:
        """Return whether this thread collects garbage, inside of which no plugin can be called."""
        return self._host.collecting.here()

    def prepare_eviction(self, context_id: str) -> None:
        """Let open requests in a context save nothing, and wait until deferred work is done.

        Raises:
            LlmaasError: This thread collects garbage.
        """
        self._host.disown(context_id)
        self._host.collecting.require_none()
        self.settle()

    def revert(self) -> None:
        """End paused requests, finish deferred work and restore every original; idempotent.

        After Ctrl-C, which may interrupt the waiting, the originals are restored nevertheless.
        """
        host = self._host
        with contextlib.ExitStack() as stack:  # each callback runs whatever the others raise
            stack.callback(host.collecting.stop)
            stack.callback(self._applied.revert)
            stack.callback(host.background.close)
            if host.native is not None:
                stack.callback(host.native.close)
            stack.callback(setattr, host.hooks, "is_ending", True)
            stack.callback(self.settle)
            for work in (host.give_up_parked, host.end_paused):
                stack.callback(work)  # again, as Ctrl-C may cut off the first call
                stack.callback(work)
            host.log_buffer.replay()


def install(hooks: HookManager) -> Installed:
    """Patch llama_cpp for the plugins of ``hooks``.

    Raises:
        IncompatibleError: The patches do not support the installed llama-cpp-python; nothing was
            patched.
    """
    check_version()
    installed = Installed(Host(hooks), Applied())
    try:
        installed.apply()
    except BaseException:  # also Ctrl-C after the last patch
        installed.revert()
        raise
    return installed
