"""Signals that end the process while Python is finalized, when its own handlers no longer run."""

from __future__ import annotations

from ._ffi import lib
from .base import fail

__all__ = ["exit_on_signal"]


def exit_on_signal(number: int, status: int) -> None:
    """Make signal ``number`` end the process at once with ``status``; threads are not waited for.

    Python's handler for the signal must be ``SIG_IGN``: finalization resets any other to the
    default one.
    """
    if code := lib.llmaas_signal_exit(number, status):
        raise fail(f"handling of signal {number}", code)
