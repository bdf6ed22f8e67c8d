"""Switching the suite on and off."""

from __future__ import annotations

import atexit
import functools
import json
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from llmaas_hooks import HookManager, forks
from llmaas_hooks.discovery import load_plugin
from llmaas_hooks.errors import ConfigError, PluginError
from llmaas_plugins.config import Config, Source, load_config, validated

__all__ = ["Suite", "activate", "active_suite", "make_plugin"]

_log = logging.getLogger("llmaas")
_lock = forks.lock()
_active: Suite | None = None


class Suite:
    """An activation: enabled plugins, their hooks, and the patches under them."""

    def __init__(self, config: Config, listeners: Mapping[str, object]) -> None:
        """Load, configure and register the plugins, then the listeners, then patch llama_cpp."""
        from llmaas_patches import install  # not before somebody activates

        self.config = config
        self.hooks = HookManager(config.on_error)
        try:
            for name in config.enabled():
                self.hooks.register(name, make_plugin(name, config))
            for name, listener in listeners.items():
                self.hooks.register(name, listener)
            self._installed = install(self.hooks)
        except BaseException:
            self.hooks.shutdown()
            raise
        self._depth = 1

    def status(self) -> dict[str, Any]:
        """What runs: plugin reports by name, what failed in them, the patched entry points.

        ``errors`` is ``{plugin: {hook: {"count": …, "last": …}}}``, empty when all went well.
        ``native`` is there if a plugin uses the hook point in the engine: the counters of each
        context on it.

        Raises:
            PluginError: A plugin could not report, and ``on_error`` is ``"raise"``. With ``"log"``
                its report is ``{"error": …}``.
        """
        self.settle()
        plugins = self.hooks.status()
        native = self._installed.native()
        return {
            "plugins": plugins,
            "errors": self.hooks.errors(),
            "patched": self._installed.targets(),
            **({} if native is None else {"native": native}),
        }

    def plugin(self, name: str) -> Any:
        """An enabled plugin, for what it offers beyond the hooks.

        Raises:
            LookupError: No plugin of this name is enabled.
        """
        return self.hooks.plugin(name)

    def settle(self) -> None:
        """Wait until contexts that were swapped out ahead of time are out of the engine."""
        self._installed.settle()

    def n_said(self, llama: Any) -> int:
        """Return the tokens in a context, less those that a draft model only proposed."""
        return self._installed.n_said(llama)

    def evict(self, context_id: str) -> int:
        """Forget a persistent context's KV in every tier; bytes freed.

        Raises:
            PluginError: A plugin failed, after all were asked.
        """
        self.settle()
        return self.hooks.kv_evict(context_id)

    def deactivate(self) -> None:
        """Revert the patches and close the plugins. Nested activations end with the outermost.

        A suite that is active when the interpreter exits is closed then.
        """
        with _lock:
            self._depth -= 1
            if self._depth > 0 or _active is not self:
                return
            if _log.isEnabledFor(logging.INFO):
                self._log_reports()
            self._close()

    def _close(self) -> None:
        global _active  # noqa: PLW0603  one activation a process: the patches are global
        _active = None
        try:
            self._installed.revert()
        finally:
            self.hooks.shutdown()

    def _log_reports(self) -> None:
        try:
            reports = self.status()["plugins"]
        except PluginError as error:
            _log.info("no reports: %s", error)
            return
        for name, report in reports.items():
            _log.info("%s: %s", name, json.dumps(report))

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Deactivate."""
        self.deactivate()


def make_plugin(name: str, config: Config) -> object:
    """Import the plugin installed as ``name`` and make one with its settings.

    Raises:
        UnknownPluginError: It is not installed.
        ConfigError: Its settings are wrong.
        PluginError: Its own code failed.
    """
    plugin = load_plugin(name)
    try:
        settings = validated(name, plugin.Config, config.plugins[name])
    except ConfigError:
        raise
    except Exception as error:
        raise PluginError(name, "configuration", error) from error
    try:
        return plugin(settings)
    except Exception as error:
        raise PluginError(name, "construction", error) from error


def activate(
    config: Source | Config = None, listeners: Mapping[str, object] | None = None
) -> Suite:
    """Switch the configured plugins on in this process, for every ``llama_cpp`` app in it.

    Args:
        config: Path of a ``llmaas.toml``, a mapping of the same shape, a ``Config``, or None for
            the file that ``LLMAAS_CONFIG`` names or that is found (``llmaas.toml`` in the current
            folder, else the user's own) and the other variables; ``{}`` reads no file.
        listeners: Objects of the caller's own by name, whose hooks are called as a plugin's are.

    Returns:
        The suite; leave it as a context manager or call ``deactivate``, or let the interpreter's
        exit do that. Activating again with an equal configuration returns the same suite.

    Raises:
        ConfigError: The configuration is wrong, or another one is active.
        UnknownPluginError: It enables a plugin that is not installed.
        PluginError: A plugin cannot be imported, made or registered; nothing was patched.
        IncompatibleError: The installed llama-cpp-python is not supported; nothing was patched.
    """
    global _active  # noqa: PLW0603
    wanted = config if isinstance(config, Config) else load_config(config)
    with _lock:
        if _active is None:
            _active = Suite(wanted, listeners or {})
            _close_at_exit()
            _say_what_is_without_effect(wanted)
        elif _active.config == wanted and not listeners:
            _active._depth += 1
        else:
            raise ConfigError(
                "llmaas_plugins is active with another configuration; "
                "call deactivate() on that suite first"
            )
        return _active


def _say_what_is_without_effect(config: Config) -> None:
    for line in (*config.without_effect(), config.nothing_enabled()):
        if line is not None:
            _log.warning("%s", line)


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    """Finish what the active suite has to write; nobody is left to read reports."""
    with _lock:
        if _active is not None:
            _active._close()


def active_suite() -> Suite | None:
    """The suite that is active in this process, if any."""
    return _active
