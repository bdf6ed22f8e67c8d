"""Where a thread is that calls us: inside the garbage collector, a finalizer, or our own code.

Python's collector runs wherever a thread happens to allocate something, and objects are finalized
wherever their last reference goes: with a lock held, on one of our threads, or while another thread
evaluates on the same engine. No plugin can be called there, and nothing may be waited for.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

from llmaas_hooks import LlmaasError, forks

__all__ = ["Collecting"]

_OURS = ("llmaas_patches", "llmaas_hooks")


class Collecting(forks.Forked):
    """Watches the collector, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._threads: set[int] = set()

    def start(self) -> None:
        """Be told of collections."""
        gc.callbacks.append(self._told)
        forks.watch(self)

    def stop(self) -> None:
        """Be told no more; idempotent."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def here(self) -> bool:
        """Return whether this thread collects garbage right now."""
        return threading.get_ident() in self._threads

    def require_none(self) -> None:
        """See that this thread does not collect garbage: what follows may wait for others.

        Raises:
            LlmaasError: It does.
        """
        if self.here():
            raise LlmaasError(
                "a Llama was used inside the garbage collector, where plugins' locks may be held "
                "and nothing can be waited for; expected the use outside of finalizers. Have the "
                "finalizer leave a note, and act on it elsewhere."
            )

    def may_wait(self) -> bool:
        """Return whether the caller can wait for other threads, as far as our locks matter.

        It cannot inside the collector or a finalizer, nor where a plugin or the host called the
        code that calls us: they may hold a lock that the awaited thread needs. A signal handler on
        top of our own code is such a place, too.
        """
        if self.here():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_ours(frame):  # the wrapper that asks
            frame = frame.f_back
        while frame is not None:
            if frame.f_code.co_name == "__del__" or _is_ours(frame):
                return False
            frame = frame.f_back
        return True

    def after_fork(self, *, in_child: bool) -> None:
        """Forget the parent's other threads in a child: its new ones may get their names."""
        if in_child:
            self._threads.intersection_update({threading.get_ident()})

    def _told(self, phase: str, _info: dict[str, Any]) -> None:
        change = self._threads.add if phase == "start" else self._threads.discard
        change(threading.get_ident())


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS
