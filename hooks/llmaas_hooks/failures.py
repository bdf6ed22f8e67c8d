"""Record of plugin errors: the first one is logged in full, later ones are counted."""

from __future__ import annotations

import logging
from typing import Any

from llmaas_hooks import forks
from llmaas_hooks.errors import LlmaasError, PluginError

__all__ = ["Failures"]

_log = logging.getLogger("llmaas.hooks")


class Failures:
    """Errors of one activation's plugins, by plugin and hook.

    A hook may fail once a token, so logging every error would flood the log.
    """

    def __init__(self) -> None:
        """Start without errors."""
        self._lock = forks.lock()
        self._seen: dict[tuple[str, str], tuple[int, str]] = {}

    def count(self, error: PluginError) -> int:
        """Record ``error`` and return how often its plugin has failed in that hook.

        Only the message is kept: the exception would keep its frames and their objects alive.
        """
        key = (error.plugin, error.hook)
        with self._lock:
            n = self._seen.get(key, (0, ""))[0] + 1
            self._seen[key] = (n, str(error))
        return n

    def log(self, error: PluginError) -> None:
        """Count ``error``; log the first error of its plugin in that hook.

        The log has the traceback unless the cause is a ``LlmaasError``, whose message says what to
        do.
        """
        if self.count(error) > 1:
            return
        cause = error.__cause__
        is_explained = isinstance(cause, LlmaasError)
        _log.error(
            "%s. The app's call continues; further failures of this hook are only counted",
            str(error).rstrip("."),
            exc_info=None if is_explained else cause,
        )
        if is_explained:
            _log.debug("traceback of this failure:", exc_info=cause)

    def report(self) -> dict[str, Any]:
        """Return ``{plugin: {hook: {"count": …, "last": …}}}``; "last" is the last message."""
        found: dict[str, Any] = {}
        with self._lock:
            for (plugin, hook), (n, last) in self._seen.items():
                found.setdefault(plugin, {})[hook] = {"count": n, "last": last}
        return found

    def log_repeated(self) -> None:
        """Log one line for each plugin and hook that failed more than once."""
        for hooks in self.report().values():
            for found in hooks.values():
                if found["count"] > 1:
                    _log.error("%d times: %s", found["count"], found["last"])
