"""Typed façade over pluggy with one method for each hook.

pluggy finds, checks and orders the implementations. This module calls them one by one: pluggy's own
call ends at the first exception, and a failing plugin must not silence the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pluggy

from llmaas_hooks import specs
from llmaas_hooks.drafts import Drafter, Guess
from llmaas_hooks.errors import PluginError, UnmetBudgetError
from llmaas_hooks.failures import Failures
from llmaas_hooks.implementations import Implementation, running
from llmaas_hooks.levels import NO_LEVELS, Levels
from llmaas_hooks.markers import NAME
from llmaas_hooks.memory import MemoryClaim
from llmaas_hooks.native import NativeContext, TensorInfo, WeightClaim
from llmaas_hooks.promises import RequestCost
from llmaas_hooks.request_scope import RequestScope
from llmaas_hooks.request_stats import RequestStats
from llmaas_hooks.seats import Seat
from llmaas_hooks.tokens import common_prefix
from llmaas_hooks.types import (
    ContextCreate,
    DecodeStep,
    KVRestored,
    LogitsView,
    ModelLoad,
    Request,
    Tokens,
)

__all__ = ["HookManager", "OnError"]

OnError = Literal["log", "raise"]


class HookManager:
    """Registered plugins of one activation, and calls of their hooks.

    Attributes:
        is_ending: Whether the engines' native contexts are being closed.
    """

    def __init__(self, on_error: OnError = "log") -> None:
        """Start without plugins; ``on_error`` says whether a plugin's exception reaches the app."""
        self._pm = pluggy.PluginManager(NAME)
        self._pm.add_hookspecs(specs)
        self.is_ending = False
        self._raises = on_error == "raise"
        self._failures = Failures()
        self._found: dict[str, tuple[Implementation, ...]] = dict.fromkeys(specs.__all__, ())

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin; refuse a misspelled hook instead of ignoring it.

        Raises:
            PluginError: The plugin implements a hook that does not exist, takes wrong arguments, or
                implements a hook by something else than a plain function. Or the name is taken.
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
        """Whether errors are raised to the app rather than logged."""
        return self._raises

    def names(self) -> list[str]:
        """Return the names of the registered plugins."""
        return [name for name, _ in self._pm.list_name_plugin()]

    def plugin(self, name: str) -> Any:
        """Return a registered plugin.

        Raises:
            LookupError: No plugin of this name is registered.
        """
        found = self._pm.get_plugin(name)
        if found is None:
            raise LookupError(f"no plugin {name!r} is enabled. Enabled: {', '.join(self.names())}")
        return found

    def listens(self, hook: str) -> bool:
        """Return whether any plugin implements ``hook``; wrappers on hot paths ask only once."""
        return bool(self._found[hook])

    def implemented(self, name: str) -> list[str]:
        """Return the hooks that plugin ``name`` implements, sorted."""
        callers = self._pm.get_hookcallers(self._pm.get_plugin(name)) or []
        return sorted(caller.name for caller in callers)

    def errors(self) -> dict[str, Any]:
        """Return the failures so far: ``{plugin: {hook: {"count": …, "last": …}}}``."""
        return self._failures.report()

    def model_path(self, path: str) -> str:
        """Fire ``llmaas_model_path``; return the first answer, or the path if there is none."""
        answers = self._call("llmaas_model_path", path=path).values()
        return next((answer for answer in answers if answer is not None), path)

    def model_load(self, load: ModelLoad) -> None:
        """Fire ``llmaas_model_load``."""
        self._call("llmaas_model_load", load=load)

    def weights(
        self, load: ModelLoad, tensors: Mapping[str, TensorInfo]
    ) -> list[tuple[str, WeightClaim]]:
        """Fire ``llmaas_weights``; return every claim with its plugin's name."""
        claims = self._call("llmaas_weights", load=load, tensors=tensors)
        return [(plugin, claim) for plugin, claimed in claims.items() for claim in claimed]

    def context_create(self, create: ContextCreate) -> None:
        """Fire ``llmaas_context_create``."""
        self._call("llmaas_context_create", create=create)

    def accept(self, create: ContextCreate, ctx: int) -> bool:
        """Return whether all of ``create.checks`` accept the new context.

        A check that raises counts as one that returns False.
        """
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
        """Fire ``llmaas_context_free``; log errors even with ``on_error = "raise"``.

        An app that got an exception would believe that the context still exists.
        """
        self._call("llmaas_context_free", raises=False, ctx=ctx)

    def app_batch(self, ctx: int, scope: RequestScope) -> None:
        """Fire ``llmaas_app_batch``."""
        self._call("llmaas_app_batch", ctx=ctx, scope=scope)

    def evaluated(self, step: DecodeStep) -> None:
        """Fire ``llmaas_prefill`` if a batch has several tokens, and ``llmaas_decode``."""
        try:
            if step.n_tokens > 1:
                self.prefill(step)
        finally:  # a failure does not keep plugins from being called
            self.decode(step)

    def prefill(self, step: DecodeStep) -> None:
        """Fire ``llmaas_prefill``."""
        self._call("llmaas_prefill", step=step)

    def decode(self, step: DecodeStep) -> None:
        """Fire ``llmaas_decode``."""
        self._call("llmaas_decode", step=step)

    def logits(self, view: LogitsView) -> None:
        """Fire ``llmaas_logits``."""
        self._call("llmaas_logits", view=view)

    def cost(self, request: Request, *, reuses: bool = True, shortens: bool = True) -> RequestCost:
        """Fire ``llmaas_cost``; return the answers of all plugins together.

        Args:
            request: The request.
            reuses: Whether the request may use cells that are there, or are restored. If not, no
                token counts as ready.
            shortens: Whether the request may read a part of its prompt.
        """
        caller = running.get()
        try:
            answers = self._call("llmaas_cost", request=request).values()
        finally:
            running.set(caller)
        found = (answer for answer in answers if answer is not None)
        total = functools.reduce(RequestCost.plus, found, RequestCost(_n_resident(request)))
        total = total if reuses else total._replace(n_ready=0, ready_s=0.0)
        return total if shortens else total._replace(shorter=())

    def level(self, request: Request, **may: bool) -> Levels | None:
        """Fire ``llmaas_level``; return the first answers. ``may`` is passed to ``cost``."""
        cost = functools.cache(functools.partial(self.cost, request, **may))
        answers = self._call("llmaas_level", request=request, cost=cost).values()
        levels = functools.reduce(Levels.over, answers, NO_LEVELS)
        return None if levels == NO_LEVELS else levels

    def shorten(self, request: Request, share: float | None) -> Tokens | None:
        """Fire ``llmaas_shorten``; return the first answer."""
        answers = self._call("llmaas_shorten", request=request, share=share).values()
        return next((tokens for tokens in answers if tokens is not None), None)

    def request_begin(self, request: Request, levels: Levels | None) -> None:
        """Fire ``llmaas_request_begin``."""
        self._call("llmaas_request_begin", request=request, levels=levels)

    def draft(self, request: Request, guess: Guess) -> dict[str, Drafter]:
        """Fire ``llmaas_draft``; return the drafters by plugin."""
        found = self._call("llmaas_draft", request=request, guess=guess)
        return {plugin: drafter for plugin, drafter in found.items() if drafter is not None}

    def turn(self, request: Request, n_left: int, seat: Seat | None = None) -> int | None:
        """Fire ``llmaas_turn``; return the least answer, or None if there is none."""
        answers = self._call("llmaas_turn", request=request, n_left=n_left, seat=seat).values()
        return min((answer for answer in answers if answer is not None), default=None)

    def together(self, request: Request, n_tokens: int, begins: bool) -> None:
        """Fire ``llmaas_together``."""
        self._call("llmaas_together", request=request, n_tokens=n_tokens, begins=begins)

    def request_resume(self, request: Request, levels: Levels | None, n_generated: int) -> None:
        """Fire ``llmaas_request_resume``."""
        self._call("llmaas_request_resume", request=request, levels=levels, n_generated=n_generated)

    def request_switch(self, request: Request) -> None:
        """Fire ``llmaas_request_switch``."""
        self._call("llmaas_request_switch", request=request)

    def kv_restore(self, request: Request) -> KVRestored | None:
        """Fire ``llmaas_kv_restore`` plugin by plugin until one restores cells.

        A wrong answer can be blamed on the plugin that gave it (``blame``).

        Raises:
            PluginError: A plugin failed. The cells are then in doubt, so no other plugin is asked:
                the caller drops the cells and passes the error to ``handle``.
        """
        for implementation in self._found["llmaas_kv_restore"]:
            try:
                restored: KVRestored | None = implementation({"request": request})
            except Exception as error:
                raise PluginError(implementation.plugin, implementation.hook, error) from error
            if restored is not None:
                running.set(implementation.owner)  # batches of its own called other plugins' hooks
                return restored
        return None

    def kv_save(self, request: Request, tokens: Tokens, *, is_over: bool = True) -> None:
        """Fire ``llmaas_kv_save``."""
        self._call("llmaas_kv_save", request=request, tokens=tokens, is_over=is_over)

    def kv_evict(self, context_id: str) -> int:
        """Fire ``llmaas_kv_evict``; return the bytes that all plugins freed together.

        Raises:
            PluginError: A plugin failed; all plugins were called first.
        """
        freed = self._call("llmaas_kv_evict", raises=True, context_id=context_id)
        return sum(freed.values())

    def request_end(self, request: Request, stats: RequestStats) -> None:
        """Fire ``llmaas_request_end``."""
        self._call("llmaas_request_end", request=request, stats=stats)

    def memory(self) -> list[MemoryClaim]:
        """Fire ``llmaas_memory``; return the claims of all plugins."""
        claims = self._call("llmaas_memory", raises=False)
        return [one.plain() for one in itertools.chain.from_iterable(claims.values())]

    def status(self) -> dict[str, dict[str, Any]]:
        """Fire ``llmaas_status``; return reports by plugin, ``{"error": …}`` for a failed one."""
        hook = "llmaas_status"
        reports = self._call(hook)
        failed = {found.plugin for found in self._found[hook]} - reports.keys()
        return reports | {name: {"error": self.errors()[name][hook]["last"]} for name in failed}

    def shutdown(self) -> None:
        """Fire ``llmaas_shutdown`` for every plugin, even if one fails; then forget all plugins.

        A wrapper may outlive the suite: a generator is still open, or other code patched our patch.
        Such a wrapper must find no plugin to call.
        """
        with contextlib.ExitStack() as stack:  # runs every callback, even after a Ctrl-C
            stack.callback(self._forget)
            for implementation in reversed(self._found["llmaas_shutdown"]):
                stack.callback(self._shut_down, implementation)

    def handle(self, error: PluginError) -> None:
        """Raise ``error`` or log it, depending on ``on_error``.

        An error that comes only from the suite's end is neither raised nor logged.
        """
        if self._is_by_the_end(error.__cause__):
            return
        if self._is_raised(error):
            self._failures.count(error)
            raise error
        self._failures.log(error)

    def blame(self, error: Exception) -> PluginError:
        """Return ``error`` as a failure of the plugin and hook that this thread called last."""
        plugin, hook = running.get() or ("unknown", "unknown")
        return PluginError(plugin, hook, error)

    def guarded(self, job: Callable[[], None]) -> Callable[[], None]:
        """Return ``job`` for another thread; its errors are logged under the hook that runs now."""
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

    def _is_by_the_end(self, error: BaseException | None) -> bool:
        """Return whether an app's thread is still generating, and a plugin's engine has ended."""
        return self.is_ending and isinstance(error, ReferenceError)

    def _is_raised(self, error: PluginError) -> bool:
        """Return whether the app gets ``error``; it always gets an unmet memory budget."""
        return self._raises or isinstance(error.__cause__, UnmetBudgetError)

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
        """Return the name of the plugin whose method ``function`` is, else the function's name."""
        while isinstance(function, functools.partial):
            function = function.func
        plugin = getattr(function, "__self__", function)
        return self._pm.get_name(plugin) or str(getattr(function, "__qualname__", function))

    def _implementations(self) -> dict[str, tuple[Implementation, ...]]:
        """Return all registered implementations by hook, in the order of their calls."""
        callers = {hook: getattr(self._pm.hook, hook) for hook in specs.__all__}
        return {
            hook: tuple(Implementation.of(caller, i) for i in reversed(caller.get_hookimpls()))
            for hook, caller in callers.items()
        }

    def _call(self, hook: str, *, raises: bool | None = None, **arguments: Any) -> dict[str, Any]:
        """Call all plugins and return their results by name.

        An error is raised only after the last plugin was called.
        """
        results, failed = {}, None
        for implementation in self._found[hook]:
            try:
                results[implementation.plugin] = implementation(arguments)
            except Exception as error:
                if self._is_by_the_end(error):
                    continue
                named = _named(error, implementation.plugin, hook)
                if failed is None and (self._is_raised(named) if raises is None else raises):
                    if named is not error:  # otherwise it is counted already
                        self._failures.count(named)
                    failed = named
                else:
                    self._failures.log(named)
        if failed is not None:
            raise failed
        return results


def _n_resident(request: Request) -> int:
    """Return how many leading prompt tokens the engine's cells hold; another app's do not count."""
    engine = request.engine
    if engine.resident_app != request.app:
        return 0
    return common_prefix(engine.resident_tokens()[: engine.n_explained], request.tokens)


def _named(error: Exception, plugin: str, hook: str) -> PluginError:
    """Return an error as a plugin's failure, unless it is that of a hook that the plugin called."""
    return error if isinstance(error, PluginError) else PluginError(plugin, hook, error)
