"""Work that no signal may interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["signals_wait"]


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM come when this ends, not while it lasts."""
    if threading.current_thread() is not threading.main_thread():  # they come to no other
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
