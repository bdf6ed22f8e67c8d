"""Delay signals during work that must not be interrupted.

A handler such as Ctrl-C's may raise an exception between any two steps of Python code, also inside
``threading.Condition``, ``Event`` and ``Future``. Their locks then stay locked forever. So threads
hand work to each other only inside of such blocks.

Signals without a handler in Python act at once: they interrupt no Python code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions take ten times as long
import contextlib
import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from llmaas_hooks import forks
from llmaas_plugins._native.signals import keep_action, put_action_back

__all__ = ["is_uninterrupted", "signals_wait", "wait_at_forks"]

_NUMBERS: tuple[int, ...] = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_SOON_S = 0.01
"""Time after a fork until what a handler raised meanwhile is raised, outside of ``os.fork``."""


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
        self._is_for_fork = False
        forks.watch(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Leave the signals to the parent; end a block that another thread was in."""
        if in_child:
            self.came.clear()
            if threading.get_ident() != self._thread:
                self.restore()

    def before_all(self) -> None:
        """Begin before any object is told of a fork."""
        if not is_uninterrupted():
            self._is_for_fork = True
            with contextlib.suppress(ValueError):
                self.begin()

    def after_all(self) -> None:
        """End when all objects were told that the fork is over; deliver what came, in the parent.

        ``os.fork`` would only report what a handler raises here, so that is raised after it.
        """
        if not self._is_for_fork:
            return
        self._is_for_fork = False
        self.restore()
        while self.came:
            number = next(iter(self.came))
            del self.came[number]
            try:
                _handle(number)
            except BaseException as error:
                _raise_soon(number, error)

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


def _raise_soon(number: int, error: BaseException) -> None:
    """Let the main thread raise what a signal's handler raised, once it has left ``os.fork``.

    The signal comes again for that. It has another handler then: its own one has run.
    """
    handler, owed = _signal.getsignal(number), [error]

    def raise_it(*_: object) -> None:
        _set_handler(number, handler)
        raise owed.pop()  # its traceback has this frame, which must not keep it

    def send() -> None:
        time.sleep(_SOON_S)
        if owed:  # else the same signal came from somewhere else
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    _set_handler(number, raise_it)
    threading.Thread(target=send, daemon=True).start()


def _set_handler(number: int, handler: Any) -> None:
    """Set the handler of a signal whose action stays as it is otherwise."""
    keep_action(number)
    _signal.signal(number, handler)
    put_action_back(number)


@functools.cache
def wait_at_forks() -> None:
    """Delay signals during forks by the main thread, from now on.

    ``os.fork`` drops an exception that a handler raises while objects are told of the fork: those
    that come later would not be told, and the child would have them in the middle of their work.
    """
    # Registered after the callbacks of ``forks``: the first to run before a fork, the last after it
    os.register_at_fork(
        before=_delay.before_all,
        after_in_parent=_delay.after_all,
        after_in_child=_delay.after_all,
    )


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
