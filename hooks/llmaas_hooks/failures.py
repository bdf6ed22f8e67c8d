"""What plugins did wrong: told once in full, then counted."""

from __future__ import annotations

import logging
from typing import Any

from llmaas_hooks import forks
from llmaas_hooks.errors import LlmaasError, PluginError

__all__ = ["Failures"]

_log = logging.getLogger("llmaas.hooks")


class Failures:
    """Errors of one activation's plugins, by plugin and hook. A hook may fail once a token."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock = forks.lock()
        self._seen: dict[tuple[str, str], tuple[int, str]] = {}

    def count(self, error: PluginError) -> int:
        """Remember ``error``; how many its plugin has had in that hook now.

        Only the text is kept: an exception would keep its frames alive, and what they hold.
        """
        key = (error.plugin, error.hook)
        with self._lock:
            n = self._seen.get(key, (0, ""))[0] + 1
            self._seen[key] = (n, str(error))
        return n

    def log(self, error: PluginError) -> None:
        """Count ``error``, and log its plugin's first one in that hook.

        With the traceback, unless it is an error of the suite's: its message says what to do.
        """
        if self.count(error) > 1:
            return
        cause = error.__cause__
        is_explained = isinstance(cause, LlmaasError)
        _log.error(
            "%s. The app's call goes on; the next failures there are only counted",
            str(error).rstrip("."),
            exc_info=None if is_explained else cause,
        )
        if is_explained:
            _log.debug("what led to it:", exc_info=cause)

    def report(self) -> dict[str, Any]:
        """``{plugin: {hook: {"count": …, "last": …}}}``."""
        found: dict[str, Any] = {}
        with self._lock:
            for (plugin, hook), (n, last) in self._seen.items():
                found.setdefault(plugin, {})[hook] = {"count": n, "last": last}
        return found

    def log_repeated(self) -> None:
        """One line for each plugin and hook that failed more often than was logged."""
        for hooks in self.report().values():
            for found in hooks.values():
                if found["count"] > 1:
                    _log.error("%d times: %s", found["count"], found["last"])
