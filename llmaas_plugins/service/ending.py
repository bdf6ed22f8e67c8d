"""Signals that end the process, whatever else goes on in it."""

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

__all__ = ["Ending"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DONE = b"\0"
_WRITING_S = 60.0
"""Longest time to write what is not on disk yet, after the running call has had its grace."""
_AT_ONCE_S = 5.0
"""The same after a second signal."""


class Ending:
    """Ends the process: in time after one signal, soon after two, at once after three.

    A thread of its own hears of them. Python's handlers would run on the main thread only, which
    may be inside libllama, or wait for a thread that never ends. Nothing is lost by an end without
    a goodbye: what was answered is on disk, and whatever is there can be cut off at any moment.
    """

    def __init__(self, grace_s: float) -> None:
        """Give the running call so much time."""
        self._longest_s = grace_s + _WRITING_S
        self._end: Callable[[], Any] | None = None
        self._n_signals = 0
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        """From now on, a signal ends the process at once."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="llmaas-signals", daemon=True)
        self._watcher.start()
        return self

    def ask(self, end: Callable[[], Any]) -> None:
        """From now on, a signal calls ``end``, on another thread, which may take its time."""
        self._end = end

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave signals alone; but if there was one, the rest of the process must end in time."""
        if self._n_signals:
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
                self._leave(f"something still runs {self._longest_s:g} s after a signal to end")
            byte = os.read(self._reader, 1)
            if byte == _DONE:
                return
            if byte[0] not in _SIGNALS:
                continue
            self._n_signals += 1
            if self._end is None:
                os._exit(0)  # nothing was begun
            if self._n_signals > 2:
                self._leave("told so three times")
            self._end()
            self._longest_s = self._longest_s if deadline is None else _AT_ONCE_S
            deadline = min(deadline or sys.maxsize, time.monotonic() + self._longest_s)

    @staticmethod
    def _leave(why: str) -> None:
        os.write(2, f"llmaas: ended without waiting any longer: {why}\n".encode())
        os._exit(1)
