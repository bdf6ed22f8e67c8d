"""Whether this thread is inside Python's garbage collector.

It ends the generators that it finds in cycles wherever a thread happens to allocate something: with
a lock held, or while another thread evaluates on the same engine. No plugin can be called there.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

__all__ = ["Collecting"]


class Collecting:
    """Watches the collector, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._threads: set[int] = set()

    def start(self) -> None:
        """Be told of collections."""
        gc.callbacks.append(self._told)

    def stop(self) -> None:
        """Be told no more; idempotent."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def here(self) -> bool:
        """Whether this thread collects garbage right now."""
        return threading.get_ident() in self._threads

    def _told(self, phase: str, _info: dict[str, Any]) -> None:
        change = self._threads.add if phase == "start" else self._threads.discard
        change(threading.get_ident())
