"""Hold back the suite's log records while llama-cpp-python discards stderr.

With ``verbose=False``, which most apps use, llama-cpp-python discards stderr while it loads a
model. Messages about a wrong model, or about plugins that do not serve it, would be lost.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from llama_cpp import _utils

__all__ = ["LogBuffer"]

_LOGGER = logging.getLogger("llmaas")


class LogBuffer(logging.Handler):
    """Log handler that keeps the suite's records, in place of all others, and logs them later."""

    def __init__(self) -> None:
        """Start without records."""
        super().__init__()
        self._records: list[logging.LogRecord] = []
        self._loading = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record."""
        self._records.append(record)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Hold back the records logged inside the block if stderr is discarded."""
        if sys.stderr is not _utils.errnull_file or not self._loading.acquire(blocking=False):
            yield
            return
        handlers, propagates = _LOGGER.handlers, _LOGGER.propagate
        _LOGGER.handlers, _LOGGER.propagate = [self], False
        try:
            yield
        finally:
            _LOGGER.handlers, _LOGGER.propagate = handlers, propagates
            self._loading.release()

    def replay(self) -> None:
        """Log the kept records."""
        records, self._records = self._records, []
        for record in records:
            logging.getLogger(record.name).handle(record)
