"""Activate and deactivate the suite."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from llmaas_hooks import HookManager, forks, request_scope
from llmaas_hooks.discovery import load_plugin, plugin_entry
from llmaas_hooks.errors import ConfigError, PluginError
from llmaas_plugins.config import Config, Source, load_config, validated
from llmaas_plugins.model.made_files import MadeFiles

__all__ = ["Suite", "activate", "active_suite", "make_plugin", "without"]

_log = logging.getLogger("llmaas")
_lock = forks.lock()
_PATIENCE_S = 10.0
_active: Suite | None = None


class _Changes(forks.Forked):
    """Activations and deactivations, which forks on other threads wait for.

    A child would have half of an activation. It would also wait forever for a module that another
    thread of its parent was importing. A deactivation needs other objects' background work, so
    forks wait before they stop that work. They do not wait forever, because a plugin that is being
    activated may wait for the forking thread.
    """

    comes_first = True

    def __init__(self) -> None:
        self._fork = threading.local()

    def before_fork(self) -> None:
        self._fork.has_lock = _lock.acquire(timeout=_PATIENCE_S)

    def after_fork(self, *, in_child: bool) -> None:
        del in_child
        if self._fork.has_lock:
            _lock.release()


_changes = _Changes()
forks.watch(_changes)


class Suite:
    """An activation: the enabled plugins, their hooks, and the patches that call them."""

    def __init__(self, config: Config, listeners: Mapping[str, object]) -> None:
        """Prepare an activation, which ``open`` begins and ``close`` ends."""
        self.config = config
        self.hooks = HookManager(config.on_error)
        self._listeners = listeners
        self._depth = 1

    def open(self) -> None:
        """Load, configure and register the plugins, then the listeners, then patch llama_cpp."""
        global _active  # noqa: PLW0603  one activation per process, because patches are global
        from llmaas_patches import install  # import patches only when activated

        try:
            if self.config.enabled():
                from llmaas_plugins.signals import wait_at_forks

                wait_at_forks()
            if self.config.memory.budget and self.config.enabled():  # before plugins ask for memory
                from llmaas_plugins.memory.shared import SharedMemory

                budget = int(self.config.memory.budget)
                self.hooks.register("memory", SharedMemory(budget, self.hooks.memory))
            for name in self.config.enabled():
                self.hooks.register(name, make_plugin(name, self.config))
            if self.config.models and self.config.enabled():  # with nothing on, vanilla
                self.hooks.register("models", MadeFiles(self.config.models))
            for name, listener in self._listeners.items():
                self.hooks.register(name, listener)
            self._installed = install(self.hooks)
            _active = self
        except BaseException:
            self.close()
            raise

    def status(self) -> dict[str, Any]:
        """Return the plugins' reports, the memory by owner, errors, and the patched entry points.

        ``errors`` is ``{plugin: {hook: {"count": …, "last": …}}}``; it is empty if no plugin
        failed. ``native`` is present if a plugin uses the hook point in the engine. It has the
        counters of each context there.

        Raises:
            PluginError: A plugin could not report, and ``on_error`` is ``"raise"``. With ``"log"``,
                its report is ``{"error": …}``.
        """
        self.settle()
        plugins = self.hooks.status()
        native = self._installed.native()
        return {
            "plugins": plugins,
            "memory": self.memory(),
            "errors": self.hooks.errors(),
            "patched": self._installed.targets(),
            **({} if native is None else {"native": native}),
        }

    def memory(self) -> dict[str, Any]:
        """Return who has which memory of the process, and why (``memory.owners``)."""
        with forks.postponed():  # a child could not finish another thread's import
            from llmaas_plugins.memory.owners import owners
        return owners([*self._installed.memory(), *self.hooks.memory()])

    def plugin(self, name: str) -> Any:
        """Return an enabled plugin, to call methods that are no hooks.

        Raises:
            LookupError: No plugin of this name is enabled.
        """
        return self.hooks.plugin(name)

    def settle(self) -> None:
        """Wait until contexts that are being swapped out ahead of time have left the engine."""
        self._installed.settle()

    def n_said(self, llama: Any) -> int:
        """Return the tokens in a context, without those that a draft model only proposed."""
        return self._installed.n_said(llama)

    def evict(self, context_id: str) -> int:
        """Erase all that plugins keep of a persistent context; return the bytes of KV freed.

        Nothing is stored of requests that are still open in the context.

        Raises:
            LlmaasError: This thread collects garbage.
            PluginError: A plugin failed. All plugins were called.
        """
        self._installed.prepare_eviction(context_id)
        return self.hooks.kv_evict(context_id)

    def is_collecting(self) -> bool:
        """Return whether this thread collects garbage, inside of which ``evict`` is refused."""
        return self._installed.is_collecting()

    def deactivate(self) -> None:
        """Revert the patches and close the plugins. Nested activations end with the outermost one.

        A suite that is active when the interpreter exits is closed then.
        """
        with _lock:
            self._depth -= 1
            if self._depth > 0 or _active is not self:
                return
            if _log.isEnabledFor(logging.INFO):
                self._log_reports()
            self.close()

    def nest(self) -> None:
        """Count one more activation, which one more ``deactivate`` ends."""
        self._depth += 1

    def close(self) -> None:
        """Revert the patches and close the plugins, however many activations are open."""
        global _active  # noqa: PLW0603
        installed = getattr(self, "_installed", None)  # None if a plugin could not be loaded
        try:
            if installed is not None:
                installed.revert()
        finally:
            is_patched = installed is not None and installed.targets()
            if _active is self and not is_patched:  # otherwise Ctrl-C came again; call this again
                _active = None
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
        """Return the active suite."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Deactivate the suite."""
        self.deactivate()


def make_plugin(name: str, config: Config) -> object:
    """Import the plugin installed as ``name`` and create it with its settings.

    Raises:
        UnknownPluginError: The plugin is not installed.
        ConfigError: The plugin's settings are wrong.
        PluginError: The plugin's own code failed.
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
    """Activate the configured plugins in this process, for every app that uses ``llama_cpp``.

    Args:
        config: Path of a ``llmaas.toml``, a mapping of the same shape, or a ``Config``. None means
            the file that ``LLMAAS_CONFIG`` names, else the ``llmaas.toml`` of the current folder or
            the user, plus the other environment variables. ``{}`` reads no file.
        listeners: The caller's own objects by name; their hooks are called like a plugin's.

    Returns:
        The suite. Use it as a context manager, call ``deactivate``, or let it end with the
        interpreter. Activating again with an equal configuration returns the same suite.

    Raises:
        ConfigError: The configuration is wrong, or another one is active.
        UnknownPluginError: The configuration enables a plugin that is not installed.
        PluginError: A plugin cannot be imported, created or registered; nothing was patched.
        IncompatibleError: The installed llama-cpp-python is not supported; nothing was patched.
    """
    wanted = config if isinstance(config, Config) else load_config(config)
    suite = Suite(wanted, listeners or {})
    try:
        with _lock:
            if _active is None:
                suite.open()
                _close_at_exit()
                _say_what_is_without_effect(wanted)
            else:
                _require_equal(_active, wanted, listeners)
                _active.nest()
                suite = _active
            return suite
    except BaseException:  # also Ctrl-C after the last patch
        suite.deactivate()
        raise


def _require_equal(active: Suite, wanted: Config, listeners: Mapping[str, object] | None) -> None:
    if active.config != wanted or listeners:
        raise ConfigError(
            "llmaas_plugins is active with another configuration. Under `llmaas run` or "
            "`llmaas serve` leave out activate(); elsewhere call deactivate() on the active "
            "suite first"
        )


def _say_what_is_without_effect(config: Config) -> None:
    for line in (*config.without_effect(), config.nothing_enabled()):
        if line is not None:
            _log.warning("%s", line)


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    """Finish the active suite's writes without logging reports."""
    with _lock:
        if _active is not None:
            _active.close()


def active_suite() -> Suite | None:
    """Return the suite that is active in this process, or None."""
    return _active


def without(*names: str) -> AbstractContextManager[None]:
    """Exclude plugins from the requests that are started inside the block.

    The block applies to this thread or task; nested blocks add up. A plugin's effects on the whole
    process (weights, contexts that are created) stay.

        with llmaas_plugins.without("knn_lm"):
            llm("Once upon a time")          # the model's own words

    Raises:
        UnknownPluginError: A name is not that of an installed plugin.
    """
    suite = active_suite()
    known = () if suite is None else suite.config.enabled()
    for name in names:
        if name not in known:  # searching installed plugins takes milliseconds
            plugin_entry(name)
    return request_scope.without(*names)
