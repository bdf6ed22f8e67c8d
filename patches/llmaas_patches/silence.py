"""What the suite logs while llama-cpp-python has sent stderr nowhere.

With ``verbose=False``, as most apps have it, that is so while a model is loaded: whatever is wrong
with it, and which plugins leave it alone, would be said to nobody.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from llama_cpp import _utils

__all__ = ["Silence"]

_LOGGER = logging.getLogger("llmaas")


class Silence(logging.Handler):
    """Takes the suite's records in place of all other handlers, and gives them back later."""

    def __init__(self) -> None:
        """Take nothing yet."""
        super().__init__()
        self._records: list[logging.LogRecord] = []
        self._loading = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self._records.append(record)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside the block, keep what is logged if stderr leads nowhere."""
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

    def end(self) -> None:
        """Log what was kept."""
        records, self._records = self._records, []
        for record in records:
            logging.getLogger(record.name).handle(record)
