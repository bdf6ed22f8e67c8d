"""A typed façade over pluggy: one method a hook, and the only place that touches its relay."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pluggy

from llmaas_hooks import specs
from llmaas_hooks.errors import LlmaasError, PluginError
from llmaas_hooks.markers import NAME
from llmaas_hooks.types import (
    ContextCreate,
    DecodeStep,
    KVRestored,
    LogitsView,
    ModelLoad,
    Request,
    RequestStats,
    Tokens,
)

__all__ = ["HookManager", "OnError"]

OnError = Literal["log", "raise"]
_log = logging.getLogger("llmaas.hooks")


class HookManager:
    """The plugins of one activation and their hooks."""

    def __init__(self, on_error: OnError = "log") -> None:
        """Start empty; ``on_error`` says what a plugin's exception does to the app's call."""
        self._pm = pluggy.PluginManager(NAME)
        self._pm.add_hookspecs(specs)
        self._on_error = on_error

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin; a misspelt hook is an error, not silence.

        Raises:
            PluginError: It implements a hook that does not exist, or with wrong arguments.
        """
        try:
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
        except pluggy.PluginValidationError as error:
            if self._pm.has_plugin(name):
                self._pm.unregister(name=name)
            raise PluginError(name, "registration", error) from error

    def names(self) -> list[str]:
        """Names of the registered plugins."""
        return [name for name, _ in self._pm.list_name_plugin()]

    def listens(self, hook: str) -> bool:
        """Whether any plugin implements ``hook``; the hot wrappers ask once and keep the answer."""
        return bool(getattr(self._pm.hook, hook).get_hookimpls())

    def implemented(self, name: str) -> list[str]:
        """Hooks that plugin ``name`` implements, sorted."""
        callers = self._pm.get_hookcallers(self._pm.get_plugin(name)) or []
        return sorted(caller.name for caller in callers)

    def model_load(self, load: ModelLoad) -> None:
        """Fire ``llmaas_model_load``."""
        self._call("llmaas_model_load", load=load)

    def context_create(self, create: ContextCreate) -> None:
        """Fire ``llmaas_context_create``."""
        self._call("llmaas_context_create", create=create)

    def decode(self, step: DecodeStep) -> None:
        """Fire ``llmaas_decode``."""
        self._call("llmaas_decode", step=step)

    def logits(self, view: LogitsView) -> None:
        """Fire ``llmaas_logits``."""
        self._call("llmaas_logits", view=view)

    def request_begin(self, request: Request) -> None:
        """Fire ``llmaas_request_begin``."""
        self._call("llmaas_request_begin", request=request)

    def kv_restore(self, request: Request) -> KVRestored | None:
        """Fire ``llmaas_kv_restore``; an exception is always raised: the cells are in doubt."""
        result: KVRestored | None = self._relay("llmaas_kv_restore", request=request)
        return result

    def kv_save(self, request: Request, tokens: Tokens) -> None:
        """Fire ``llmaas_kv_save``."""
        self._call("llmaas_kv_save", request=request, tokens=tokens)

    def kv_evict(self, context_id: str) -> int:
        """Fire ``llmaas_kv_evict``; bytes freed over all plugins."""
        freed: list[int] = self._relay("llmaas_kv_evict", context_id=context_id)
        return sum(freed)

    def request_end(self, request: Request, stats: RequestStats) -> None:
        """Fire ``llmaas_request_end``."""
        self._call("llmaas_request_end", request=request, stats=stats)

    def status(self) -> dict[str, dict[str, Any]]:
        """Fire ``llmaas_status``; a report by plugin name."""
        caller = self._pm.hook.llmaas_status
        reports: dict[str, Any] = {i.plugin_name: i.function() for i in caller.get_hookimpls()}
        return reports

    def shutdown(self) -> None:
        """Fire ``llmaas_shutdown`` for each plugin, also when another one's fails; forget all.

        A wrapper may outlive the suite (a generator still open, other code's patch on top of
        ours): it must find nobody to call.
        """
        for impl in self._pm.hook.llmaas_shutdown.get_hookimpls():
            try:
                impl.function()
            except Exception:
                _log.exception("plugin %r failed in llmaas_shutdown", impl.plugin_name)
        for name in self.names():
            self._pm.unregister(name=name)

    def handle(self, error: LlmaasError) -> None:
        """Raise or log ``error``, as ``on_error`` says."""
        if self._on_error == "raise":
            raise error
        _log.error("%s; the app's call goes on without it", error, exc_info=error.__cause__)

    def _call(self, hook: str, **kwargs: Any) -> None:
        try:
            self._relay(hook, **kwargs)
        except LlmaasError as error:
            self.handle(error)

    def _relay(self, hook: str, **kwargs: Any) -> Any:
        caller: pluggy.HookCaller = getattr(self._pm.hook, hook)
        try:
            return caller(**kwargs)
        except Exception as error:
            raise PluginError(_culprit(caller, error), hook, error) from error


def _culprit(caller: pluggy.HookCaller, error: BaseException) -> str:
    """Name of the plugin whose implementation the traceback passes through."""
    codes = {}
    for impl in caller.get_hookimpls():
        function = getattr(impl.function, "__func__", impl.function)
        codes[getattr(function, "__code__", None)] = impl.plugin_name
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code in codes:
            return codes[frame.tb_frame.f_code]
        frame = frame.tb_next
    return "unknown"
