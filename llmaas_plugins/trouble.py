"""A failure that may come back with every call, such as a full disk: told once, then counted."""

from __future__ import annotations

import logging

__all__ = ["Trouble"]


class Trouble:
    """One thing that can go wrong again and again.

    Attributes:
        n_failures: How often it failed since it worked last.
    """

    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        """Log at ``level`` when it begins, and that it is over as information."""
        self._log, self._level = log, level
        self.n_failures = 0

    def failed(self, message: str, *values: object, error: BaseException | None = None) -> None:
        """Count a failure; tell the first one since it worked last, with the error's traceback."""
        self.n_failures += 1
        if self.n_failures == 1:
            told = f"{message}; until it works again, the next failures are only counted"
            self._log.log(self._level, told, *values, exc_info=error)

    def worked(self) -> None:
        """Note that it worked: the next failure is told."""
        if self.n_failures > 1:
            self._log.info("it works again, after %d failures", self.n_failures)
        self.n_failures = 0
