"""Where a thread is that calls us: inside the garbage collector, a finalizer, or our own code.

Python's collector runs wherever a thread happens to allocate something, and objects are finalized
wherever their last reference goes: with a lock held, on one of our threads, or while another thread
evaluates on the same engine. No plugin can be called there, and nothing may be waited for.
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
    """Watches the collector, from ``start`` to ``stop``.

    All that notes its phases is written in C: a signal handler's exception, such as that of Ctrl-C,
    cannot come in between, so no end is ever missed. Each phase tells all its listeners with the
    same object. A child that is forked while another thread collects has another thread's object.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._phases = OrderedDict.fromkeys(("start", "stop"))  # the last one is the last that was
        self._objects = dict[str, object]()
        self._own = threading.local()
        self._listeners: tuple[Callable[[str, Any], object], ...] = (
            functools.partial(setattr, self._own),
            self._objects.__setitem__,
            self._phases.move_to_end,
        )

    def start(self) -> None:
        """Be told of collections."""
        gc.callbacks.extend(self._listeners)

    def stop(self) -> None:
        """Be told no more; idempotent."""
        for listener in self._listeners:
            if listener in gc.callbacks:
                gc.callbacks.remove(listener)

    def here(self) -> bool:
        """Return whether this thread collects garbage right now."""
        own = getattr(self._own, "start", None)
        is_on = next(reversed(self._phases)) == "start"
        return is_on and own is not None and own is self._objects.get("start")

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


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS
