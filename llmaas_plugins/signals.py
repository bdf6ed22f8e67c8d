"""Delay signals during work that must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["signals_wait"]


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends."""
    # Python runs signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda this, _frame: came.append(this))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)
