"""Report a failure that may recur with every call, such as a full disk: log it once, then count."""

from __future__ import annotations

import logging

__all__ = ["FailureLog"]


class FailureLog:
    """Log of one kind of failure that may recur.

    Attributes:
        n_failures: Number of failures since the last success.
    """

    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        """Log the first failure at ``level``, and the recovery as information."""
        self._log, self._level = log, level
        self.n_failures = 0

    def failed(self, message: str, *values: object, error: BaseException | None = None) -> None:
        """Count a failure; log the first one since the last success, with the error's traceback."""
        self.n_failures += 1
        if self.n_failures == 1:
            text = (message % values if values else message).rstrip(".")
            told = "%s; until it works again, further failures are only counted"
            self._log.log(self._level, told, text, exc_info=error)

    def worked(self) -> None:
        """Record a success, so that the next failure is logged."""
        if self.n_failures > 1:
            self._log.info("it works again, after %d failures", self.n_failures)
        self.n_failures = 0
