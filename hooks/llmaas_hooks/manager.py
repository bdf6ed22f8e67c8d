"""A typed façade over pluggy: one method a hook.

pluggy finds, checks and orders the implementations. They are called here, one by one: pluggy's own
call ends at the first exception, and a failing plugin must not silence the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pluggy

from llmaas_hooks import specs
from llmaas_hooks.errors import PluginError
from llmaas_hooks.failures import Failures
from llmaas_hooks.implementations import Implementation, running
from llmaas_hooks.markers import NAME
from llmaas_hooks.native import NativeContext, TensorInfo, WeightClaim
from llmaas_hooks.types import (
    ContextCreate,
    DecodeStep,
    KVRestored,
    Levels,
    LogitsView,
    ModelLoad,
    Request,
    RequestStats,
    Tokens,
)

__all__ = ["HookManager", "OnError"]

OnError = Literal["log", "raise"]


class HookManager:
    """The plugins of one activation and their hooks."""

    def __init__(self, on_error: OnError = "log") -> None:
        """Start empty; ``on_error`` says what a plugin's exception does to the app's call."""
        self._pm = pluggy.PluginManager(NAME)
        self._pm.add_hookspecs(specs)
        self._raises = on_error == "raise"
        self._failures = Failures()
        self._found: dict[str, tuple[Implementation, ...]] = dict.fromkeys(specs.__all__, ())

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin; a misspelt hook is an error, not silence.

        Raises:
            PluginError: It implements a hook that does not exist, with wrong arguments, or as
                something else than a plain function; or the name is taken.
        """
        is_new = not self._pm.has_plugin(name)
        try:
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
            self._found = self._implementations()
        except Exception as error:
            if is_new and self._pm.has_plugin(name):
                self._pm.unregister(name=name)
            raise PluginError(name, "registration", error) from error

    @property
    def raises(self) -> bool:
        """Whether errors are raised to the app; else they are logged."""
        return self._raises

    def names(self) -> list[str]:
        """Names of the registered plugins."""
        return [name for name, _ in self._pm.list_name_plugin()]

    def plugin(self, name: str) -> Any:
        """A registered plugin.

        Raises:
            LookupError: There is none of this name.
        """
        found = self._pm.get_plugin(name)
        if found is None:
            raise LookupError(
                f"no plugin {name!r} is enabled; those are: {', '.join(self.names())}"
            )
        return found

    def listens(self, hook: str) -> bool:
        """Whether any plugin implements ``hook``; the hot wrappers ask once and keep the answer."""
        return bool(self._found[hook])

    def implemented(self, name: str) -> list[str]:
        """Hooks that plugin ``name`` implements, sorted."""
        callers = self._pm.get_hookcallers(self._pm.get_plugin(name)) or []
        return sorted(caller.name for caller in callers)

    def errors(self) -> dict[str, Any]:
        """What failed so far: ``{plugin: {hook: {"count": …, "last": …}}}``."""
        return self._failures.report()

    def model_load(self, load: ModelLoad) -> None:
        """Fire ``llmaas_model_load``."""
        self._call("llmaas_model_load", load=load)

    def weights(
        self, load: ModelLoad, tensors: Mapping[str, TensorInfo]
    ) -> list[tuple[str, WeightClaim]]:
        """Fire ``llmaas_weights``; every claim, with its plugin's name."""
        claims = self._call("llmaas_weights", load=load, tensors=tensors)
        return [(plugin, claim) for plugin, claimed in claims.items() for claim in claimed]

    def context_create(self, create: ContextCreate) -> None:
        """Fire ``llmaas_context_create``."""
        self._call("llmaas_context_create", create=create)

    def accept(self, create: ContextCreate, ctx: int) -> bool:
        """Whether all ``create.checks`` find the new context usable; one that fails does not."""
        for check in create.checks:
            try:
                if not check(ctx):
                    return False
            except Exception as error:
                self.handle(PluginError(self._owner(check), "llmaas_context_create (check)", error))
                return False
        return True

    def native_context(self, context: NativeContext) -> None:
        """Fire ``llmaas_native_context``."""
        self._call("llmaas_native_context", context=context)

    def context_free(self, ctx: int) -> None:
        """Fire ``llmaas_context_free``; an app that got an error would take it for still there."""
        self._call("llmaas_context_free", raises=False, ctx=ctx)

    def decode(self, step: DecodeStep) -> None:
        """Fire ``llmaas_decode``."""
        self._call("llmaas_decode", step=step)

    def logits(self, view: LogitsView) -> None:
        """Fire ``llmaas_logits``."""
        self._call("llmaas_logits", view=view)

    def level(self, request: Request) -> Levels | None:
        """Fire ``llmaas_level``; what the first plugin says that chooses."""
        answers = self._call("llmaas_level", request=request).values()
        return next((levels for levels in answers if levels is not None), None)

    def request_begin(self, request: Request, levels: Levels | None) -> None:
        """Fire ``llmaas_request_begin``."""
        self._call("llmaas_request_begin", request=request, levels=levels)

    def kv_restore(self, request: Request) -> KVRestored | None:
        """Fire ``llmaas_kv_restore`` until a plugin has restored something.

        Raises:
            PluginError: A plugin failed. The cells are in doubt then, so no other is asked: the
                caller drops them, and gives the error to ``handle``.
        """
        for implementation in self._found["llmaas_kv_restore"]:
            try:
                restored: KVRestored | None = implementation({"request": request})
            except Exception as error:
                raise PluginError(implementation.plugin, implementation.hook, error) from error
            if restored is not None:
                return restored
        return None

    def kv_save(self, request: Request, tokens: Tokens) -> None:
        """Fire ``llmaas_kv_save``."""
        self._call("llmaas_kv_save", request=request, tokens=tokens)

    def kv_evict(self, context_id: str) -> int:
        """Fire ``llmaas_kv_evict``; bytes freed over all plugins.

        Raises:
            PluginError: One of them failed, after all were asked.
        """
        freed = self._call("llmaas_kv_evict", raises=True, context_id=context_id)
        return sum(freed.values())

    def request_end(self, request: Request, stats: RequestStats) -> None:
        """Fire ``llmaas_request_end``."""
        self._call("llmaas_request_end", request=request, stats=stats)

    def status(self) -> dict[str, dict[str, Any]]:
        """Fire ``llmaas_status``; a report by plugin name, ``{"error": …}`` for one that failed."""
        hook = "llmaas_status"
        reports = self._call(hook)
        failed = {found.plugin for found in self._found[hook]} - reports.keys()
        return reports | {name: {"error": self.errors()[name][hook]["last"]} for name in failed}

    def shutdown(self) -> None:
        """Fire ``llmaas_shutdown`` for each plugin, also when another one's fails; forget all.

        A wrapper may outlive the suite (a generator still open, other code's patch on top of
        ours): it must find nobody to call.
        """
        with contextlib.ExitStack() as stack:  # goes on after a Ctrl-C, too
            stack.callback(self._forget)
            for implementation in reversed(self._found["llmaas_shutdown"]):
                stack.callback(self._shut_down, implementation)

    def handle(self, error: PluginError) -> None:
        """Raise or log ``error``, as ``on_error`` says."""
        if self._raises:
            self._failures.count(error)
            raise error
        self._failures.log(error)

    def blame(self, error: Exception) -> PluginError:
        """``error`` as one of the plugin and hook that were called last in this thread."""
        plugin, hook = running.get() or ("unknown", "unknown")
        return PluginError(plugin, hook, error)

    def guarded(self, job: Callable[[], None]) -> Callable[[], None]:
        """``job`` for another thread; it fails in the name of the hook that is running now."""
        owner = running.get()
        if owner is None:
            return job

        plugin, hook = owner

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failures.log(PluginError(plugin, f"{hook} (deferred)", error))

        return run

    def _shut_down(self, implementation: Implementation) -> None:
        try:
            implementation({})
        except Exception as error:
            self._failures.log(PluginError(implementation.plugin, implementation.hook, error))

    def _forget(self) -> None:
        self._found = dict.fromkeys(specs.__all__, ())
        for name in self.names():
            self._pm.unregister(name=name)
        self._failures.log_repeated()

    def _owner(self, function: Any) -> str:
        """Name of the plugin that ``function`` is a method of, else the function's own."""
        while isinstance(function, functools.partial):
            function = function.func
        plugin = getattr(function, "__self__", function)
        return self._pm.get_name(plugin) or str(getattr(function, "__qualname__", function))

    def _implementations(self) -> dict[str, tuple[Implementation, ...]]:
        """All that are registered, in the order they are called."""
        callers = {hook: getattr(self._pm.hook, hook) for hook in specs.__all__}
        return {
            hook: tuple(Implementation.of(caller, i) for i in reversed(caller.get_hookimpls()))
            for hook, caller in callers.items()
        }

    def _call(self, hook: str, *, raises: bool | None = None, **arguments: Any) -> dict[str, Any]:
        """What each plugin returned, by name. All are called before an error is raised."""
        results, failed = {}, None
        for implementation in self._found[hook]:
            try:
                results[implementation.plugin] = implementation(arguments)
            except Exception as error:
                named = PluginError(implementation.plugin, hook, error)
                if failed is None and (self._raises if raises is None else raises):
                    self._failures.count(named)
                    failed = named
                else:
                    self._failures.log(named)
        if failed is not None:
            raise failed
        return results
