"""End of commands that are interrupted: one line of output, and the status that shells expect.

This module imports only the standard library, so that it works while everything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Stopped", "close_stdout", "give_signals_back", "stoppable", "take_signals"]

_AGAIN_S = 0.05


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came.

    Attributes:
        number: Number of the signal.
        then: State that this leaves, or what to do next; empty if there is nothing to say.
    """

    def __init__(self, number: int, then: str = "") -> None:
        """Store the signal and the text."""
        super().__init__(then)
        self.number = number
        self.then = then

    @property
    def status(self) -> int:
        """Exit status of a process that the signal ended."""
        return 128 + self.number


_last: int | None = None
_hook_before: Any = None


def take_signals() -> None:
    """Make Ctrl-C and SIGTERM raise ``Stopped``, unless another handler is installed."""
    global _hook_before, _last  # noqa: PLW0603  signal handlers belong to the whole process
    _last = None
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)
    if _hook_before is None:
        _hook_before, sys.unraisablehook = sys.unraisablehook, _come_again


def give_signals_back() -> int | None:
    """Restore the default signal handlers, and return the last signal that came, if any."""
    global _hook_before
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is _stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _hook_before is not None:
            sys.unraisablehook, _hook_before = _hook_before, None
    return _last


@contextlib.contextmanager
def stoppable(then: str) -> Iterator[None]:
    """Describe the state that a signal during the block leaves, and treat SIGTERM like Ctrl-C.

    Args:
        then: State that this leaves, or what to do next.

    Raises:
        Stopped: A signal came.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    before = signal.signal(signal.SIGTERM, _stop) if is_main else None
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(getattr(error, "number", signal.SIGINT), then) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def close_stdout() -> None:
    """Redirect broken standard output to null, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(number: int, _frame: object) -> None:
    global _last  # noqa: PLW0603
    _last = number
    raise Stopped(number)


def _come_again(lost: Any) -> None:
    """Send a signal again whose exception was lost, as it is in llama.cpp's callbacks."""
    if not isinstance(lost.exc_value, Stopped):
        if _hook_before is not None:
            _hook_before(lost)
        return
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), lost.exc_value.number))
    again.daemon = True
    again.start()
