"""Ending of the process by signals, whatever else is running in it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from llmaas_plugins._native import exit_on_signal

__all__ = ["Shutdown"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DONE = b"\0"
_WRITING_S = 60.0
"""Most seconds for writing data to disk, after the running call's grace period."""
_AT_ONCE_S = 5.0
"""Most seconds for everything after a second signal."""


class Shutdown:
    """End of the process by signals: in time after one, soon after two, at once after three.

    A separate thread receives the signals. Python's handlers would run only on the main thread,
    which may be inside libllama, or waiting for a thread that never ends. Exiting abruptly loses no
    data: answered calls are on disk, and files on disk tolerate being cut off at any moment.
    """

    def __init__(self, grace_s: float) -> None:
        """Give the running call ``grace_s`` seconds to finish."""
        self._longest_s = grace_s + _WRITING_S
        self._end: Callable[[], Any] | None = None
        self._n_signals = 0
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        """Start handling signals; until ``ask``, a signal ends the process at once."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="llmaas-signals", daemon=True)
        self._watcher.start()
        return self

    def ask(self, end: Callable[[], Any]) -> None:
        """Make a signal call ``end``, on another thread, instead of ending the process at once."""
        self._end = end

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the handlers, unless a signal came: then the process must still end in time.

        In that case another signal ends the process at once, even while Python is finalized.
        """
        if self._n_signals:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # finalization leaves only this handler alone
                exit_on_signal(number, 0 if error is None else 1)
            return
        signal.set_wakeup_fd(-1)
        for number, before in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, before)
        os.write(self._writer, _DONE)
        self._watcher.join()
        os.close(self._reader)
        os.close(self._writer)

    def _watch(self) -> None:
        deadline = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                self._leave(f"something still runs {self._longest_s:g} s after the signal to end")
            byte = os.read(self._reader, 1)
            if byte == _DONE:
                return
            if byte[0] not in _SIGNALS:
                continue
            self._n_signals += 1
            if self._end is None:
                os._exit(0)  # no call was begun, so there is nothing to finish
            if self._n_signals > 2:
                self._leave("it got three signals")
            self._end()
            self._longest_s = self._longest_s if deadline is None else _AT_ONCE_S
            deadline = min(deadline or sys.maxsize, time.monotonic() + self._longest_s)

    @staticmethod
    def _leave(why: str) -> None:
        os.write(2, f"llmaas: ended without waiting any longer: {why}\n".encode())
        os._exit(1)
