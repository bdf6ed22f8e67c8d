"""Actions of signals, as the C library keeps them."""

from __future__ import annotations

import ctypes

from . import _ffi
from ._ffi import lib
from .base import fail

__all__ = ["exit_on_signal", "keep_action", "put_action_back"]


_library = ctypes.PyDLL(_ffi.__file__)
"""The same library, called with the GIL held: ``lib`` releases it, and would wait to get it back
while other threads run.
"""


def exit_on_signal(number: int, status: int) -> None:
    """Make signal ``number`` end the process at once with ``status``; threads are not waited for.

    This also works while Python is finalized, when its own handlers no longer run. Python's handler
    for the signal must be ``SIG_IGN``: finalization resets any other to the default one.
    """
    if code := lib.llmaas_signal_exit(number, status):
        raise fail(f"handling of signal {number}", code)


def keep_action(number: int) -> None:
    """Keep the action of signal ``number``, with the flags that ``signal.signal`` resets."""
    if code := _library.llmaas_signal_keep(number):
        raise fail(f"keeping the action of signal {number}", code)


def put_action_back(number: int) -> None:
    """Set the action of signal ``number`` that was kept last."""
    if code := _library.llmaas_signal_put_back(number):
        raise fail(f"setting the action of signal {number}", code)
