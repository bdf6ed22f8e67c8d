"""Detect calls from inside the garbage collector, a finalizer or the suite's own code.

Python's collector runs wherever a thread allocates memory, and finalizers run wherever the last
reference to an object goes. This may happen with a lock held, on one of the suite's threads, or
while another thread evaluates on the same engine. In such places no plugin can be called, and
waiting may deadlock.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

from llmaas_hooks import LlmaasError

__all__ = ["Collecting"]

_OURS = ("llmaas_patches", "llmaas_hooks")


class Collecting:
    """Watcher of the garbage collector, from ``start`` to ``stop``.

    All callbacks are implemented in C, so that the exception of a signal handler (Ctrl-C) cannot
    interrupt them and no end of a collection is missed. In each phase the collector passes the same
    object to all callbacks, which identifies the collecting thread. A child that is forked while
    another thread collects sees that the object is not its own.
    """

    def __init__(self) -> None:
        """Prepare the callbacks; ``start`` registers them."""
        self._phases = OrderedDict.fromkeys(("start", "stop"))  # the last key is the latest phase
        self._objects = dict[str, object]()
        self._own = threading.local()
        self._listeners: tuple[Callable[[str, Any], object], ...] = (
            functools.partial(setattr, self._own),
            self._objects.__setitem__,
            self._phases.move_to_end,
        )

    def start(self) -> None:
        """Start to watch collections."""
        gc.callbacks.extend(self._listeners)

    def stop(self) -> None:
        """Stop to watch collections; idempotent."""
        for listener in self._listeners:
            if listener in gc.callbacks:
                gc.callbacks.remove(listener)

    def here(self) -> bool:
        """Return whether this thread is collecting garbage."""
        own = getattr(self._own, "start", None)
        is_on = next(reversed(self._phases)) == "start"
        return is_on and own is not None and own is self._objects.get("start")

    def require_none(self) -> None:
        """Check that this thread is not collecting garbage, so that it may wait for other threads.

        Raises:
            LlmaasError: It is collecting garbage.
        """
        if self.here():
            raise LlmaasError(
                "a Llama was used inside the garbage collector, where plugins' locks may be held "
                "and waiting may deadlock; expected its use outside of finalizers. Let the "
                "finalizer set a flag, and use the Llama elsewhere."
            )

    def may_wait(self) -> bool:
        """Return whether the caller can wait for other threads without a deadlock on our locks.

        It cannot inside the collector or a finalizer. It cannot either if a plugin or the host is
        further up the call stack, as they may hold a lock that the other thread needs. This
        includes a signal handler that interrupted the suite's own code.
        """
        if self.here():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_ours(frame):  # skip the calling wrapper
            frame = frame.f_back
        while frame is not None:
            if frame.f_code.co_name == "__del__" or _is_ours(frame):
                return False
            frame = frame.f_back
        return True


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS
