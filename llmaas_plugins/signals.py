"""Delay signals during work that must not be interrupted.

A handler such as Ctrl-C's may raise an exception between any two steps of Python code, also inside
``threading.Condition``, ``Event`` and ``Future``. Their locks then stay locked forever. So threads
hand work to each other only inside of such blocks.

Signals without a handler in Python act at once: they interrupt no Python code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions take ten times as long
import contextlib
import inspect
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from llmaas_hooks import forks
from llmaas_plugins._native.signals import keep_action, put_action_back

__all__ = ["is_uninterrupted", "signals_wait"]

_NUMBERS: tuple[int, ...] = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class _Delay(forks.Forked):
    """Delay of signals while the main thread is in a block.

    Attributes:
        handlers: Handlers that the block replaced, by signal. While there are any, other blocks
            are nested in this one, also those of a handler that runs as it ends.
        came: Signals that came in the block, in this order.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.came: dict[int, None] = {}
        self._thread = 0
        forks.watch(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Leave the signals to the parent; end a block that another thread was in."""
        if in_child:
            self.came.clear()
            if threading.get_ident() != self._thread:
                self.restore()

    def begin(self) -> None:
        """Replace all handlers in Python.

        Raises:
            ValueError: This is the main thread of ``threading``, but not of the process.
        """
        self._thread = threading.get_ident()
        for number in _NUMBERS:
            if not callable(handler := _signal.getsignal(number)):
                continue
            keep_action(number)
            self.handlers[number] = handler  # a signal that comes just now may end the block
            self.handlers[number] = _signal.signal(number, _note)
            put_action_back(number)

    def restore(self) -> BaseException | None:
        """Restore all handlers; return the last error that those restored first raised."""
        raised = None
        while self.handlers:
            try:
                for number, handler in tuple(self.handlers.items()):
                    if _signal.getsignal(number) is _note:  # else the block has set another one
                        _signal.signal(number, handler)
                        put_action_back(number)
                    del self.handlers[number]
            except BaseException as error:
                raised = error
        return raised

    def deliver(self, raised: BaseException | None) -> None:
        """Call the handlers of the signals that came; then raise the last of all errors."""
        while self.came:
            try:
                number = next(iter(self.came))
                del self.came[number]
                _handle(number)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised


_delay = _Delay()


def _note(number: int, _frame: FrameType | None) -> None:
    """Record a signal; used as the handler inside blocks."""
    _delay.came.setdefault(number)


def _handle(number: int) -> None:
    """Let a signal have its effect now.

    Its handler is called, not the signal raised again: event loops were told of the signal when it
    came, and would see a second one.
    """
    handler = _signal.getsignal(number)
    if callable(handler):
        handler(number, inspect.currentframe())
    else:
        signal.raise_signal(number)


def is_uninterrupted() -> bool:
    """Return whether no handler in Python can run here now: in other threads, or in a block."""
    return threading.current_thread() is not threading.main_thread() or bool(_delay.handlers)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Delay Ctrl-C and all other signals with a handler in Python until the block ends."""
    if is_uninterrupted():
        yield
        return
    try:
        with contextlib.suppress(ValueError):
            _delay.begin()
        yield
    finally:
        raised = None
        try:
            raised = _delay.restore()
        finally:
            _delay.deliver(raised)
