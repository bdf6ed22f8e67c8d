"""Saves while requests run, so that a killed process loses what few seconds brought."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from llmaas_hooks import StoreError, forks
from llmaas_plugins.failure_log import FailureLog

__all__ = ["EVERY_S", "Saving"]

EVERY_S = 30.0
"""Longest time for which a change stays unsaved, and least time between two saves."""

_log = logging.getLogger("llmaas.knn_lm")


class Saving:
    """Thread that saves some time after a change, and ends when nothing is left to be saved.

    A forked child has no such thread, and saves nothing: what changed is its parent's.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        """Wait for the first change.

        Args:
            save: Function that saves, or raises an error such as ``StoreError``.
        """
        self._save = save
        self._lock = forks.lock()
        self._ended = threading.Event()
        self._is_due = self._is_running = False
        self._failures = FailureLog(_log, logging.WARNING)

    def changed(self) -> None:
        """Let a change be saved soon; this takes microseconds."""
        with self._lock:
            self._is_due = True
            if self._is_running or self._ended.is_set():
                return
            self._is_running = True
            try:
                threading.Thread(target=self._run, name="llmaas-knn-save", daemon=True).start()
            except RuntimeError:  # the interpreter is ending; the suite's end saves
                self._is_running = False

    def close(self) -> None:
        """Save no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            with self._lock:
                self._is_due = False
            try:
                self._save()
            except Exception as error:  # this thread must go on, or nothing is saved any more
                unknown = None if isinstance(error, StoreError) else error
                self._failures.failed(
                    "judgments of the datastore are not saved: %s", error, error=unknown
                )
                continue
            self._failures.worked()
            with self._lock:
                if not self._is_due:
                    self._is_running = False
                    return
