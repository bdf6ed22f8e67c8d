"""How commands end that are stopped: one line, and the status a shell expects.

Imports nothing but the standard library, so that it works while everything else is imported.
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
        number: The signal.
        then: The state that this leaves, or what to do; empty if there is nothing to say.
    """

    def __init__(self, number: int, then: str = "") -> None:
        """Keep both."""
        super().__init__(then)
        self.number = number
        self.then = then

    @property
    def status(self) -> int:
        """Exit status, as of a process that the signal ended."""
        return 128 + self.number


_last: int | None = None
_hook_before: Any = None


def take_signals() -> None:
    """Let Ctrl-C and SIGTERM raise ``Stopped`` from now on, unless somebody else handles them."""
    global _hook_before, _last  # noqa: PLW0603  signals are the process's
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
    """Let signals do what they do without us; returns the last one that came, if any."""
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
    """Say what a signal leaves that comes inside, and take SIGTERM as Ctrl-C.

    Args:
        then: The state that this leaves, or what to do.

    Raises:
        Stopped: A signal came.
    """
    is_main = threading.current_thread() is threading.main_thread()  # signals are for no other
    before = signal.signal(signal.SIGTERM, _stop) if is_main else None
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(getattr(error, "number", signal.SIGINT), then) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def close_stdout() -> None:
    """Forget standard output, which cannot be written: the interpreter must not try at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(number: int, _frame: object) -> None:
    global _last  # noqa: PLW0603
    _last = number
    raise Stopped(number)


def _come_again(lost: Any) -> None:
    """Send a signal again whose exception got lost: llama.cpp's callbacks cannot pass it on."""
    if not isinstance(lost.exc_value, Stopped):
        if _hook_before is not None:
            _hook_before(lost)
        return
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), lost.exc_value.number))
    again.daemon = True
    again.start()
