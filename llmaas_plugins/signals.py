"""Delay signals during work that must not be interrupted.

A handler such as Ctrl-C's may raise an exception between any two steps of Python code, also inside
``threading.Condition``, ``Event`` and ``Future``. Their locks then stay locked forever. So threads
hand work to each other only inside of such blocks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["signals_wait"]

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_NUMBERS: tuple[int, ...] = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_outer: list[bool] = []
"""Not empty while the main thread is in a block, so that inner blocks have nothing to do."""


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and all signals with a handler in Python until the block ends."""
    # Python runs signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread() or _outer:
        yield
        return
    came: dict[int, None] = {}
    handlers = {number: signal.getsignal(number) for number in _NUMBERS}
    delayed = {number: one for number, one in handlers.items() if _is_delayed(number, one)}
    try:
        for number in delayed:
            signal.signal(number, lambda this, _frame: came.setdefault(this))
        _outer.append(True)
        yield
    finally:
        _outer.clear()
        _restore(delayed)
        for number in came:
            signal.raise_signal(number)


def _is_delayed(number: int, handler: Any) -> bool:
    return callable(handler) or (number in _ALWAYS and handler is not None)


def _restore(handlers: dict[int, Any]) -> None:
    """Restore all handlers, whatever those that are restored first raise meanwhile."""
    left, interruption = dict(handlers), None
    while left:
        try:
            for number, handler in tuple(left.items()):
                signal.signal(number, handler)
                del left[number]
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
