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

from llmaas_hooks import forks

__all__ = ["signals_wait"]

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_NUMBERS: tuple[int, ...] = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class _Delay(forks.Forked):
    """Delay of signals while the main thread is in a block.

    Attributes:
        thread: Identifier of the main thread in a block; None outside of blocks.
        handlers: Handlers that the block replaced, by signal.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.handlers: dict[int, Any] = {}
        forks.watch(self)

    def after_fork(self, *, in_child: bool) -> None:
        """End the block in a child that another thread forked: there, nobody leaves it."""
        if in_child and self.thread not in {None, threading.get_ident()}:
            self.end()

    def end(self) -> None:
        """Restore all handlers, whatever those that are restored first raise meanwhile."""
        self.thread, interruption = None, None
        while self.handlers:
            try:
                for number, handler in tuple(self.handlers.items()):
                    signal.signal(number, handler)
                    del self.handlers[number]
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption


_delay = _Delay()


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and all signals with a handler in Python until the block ends."""
    # Python runs signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread() or _delay.thread is not None:
        yield
        return
    came: dict[int, None] = {}
    found = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        _delay.thread = threading.get_ident()
        _delay.handlers = {number: one for number, one in found.items() if _is_delayed(number, one)}
        for number in _delay.handlers:
            signal.signal(number, lambda this, _frame: came.setdefault(this))
        yield
    finally:
        _delay.end()
        for number in came:
            signal.raise_signal(number)


def _is_delayed(number: int, handler: Any) -> bool:
    return callable(handler) or (number in _ALWAYS and handler is not None)
