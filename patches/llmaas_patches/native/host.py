"""What the wrappers of load, create and free do when a native plugin is on."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import ConfigError, HookManager, IncompatibleError, ModelLoad, PluginError
from llmaas_patches.native.claims import (
    HOOK,
    Place,
    Resolved,
    fill_table,
    overrides,
    resolve,
    tensor_places,
)
from llmaas_patches.native.contexts import Context
from llmaas_patches.native.library import Library, load_library

__all__ = ["NativeHost", "native_host"]

_log = logging.getLogger("llmaas.patches")
_FLASH_ATTENTION_AUTO, _FLASH_ATTENTION_ON = -1, 1


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``: weights that match go to this buffer type."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class _Model:
    """A loaded model's weight table, and whose claims are in it."""

    def __init__(self, table: Any, claimed: dict[str, Resolved]) -> None:
        self.table = table
        self.claimed = claimed

    @property
    def has_own_buffers(self) -> bool:
        return any(found.source for found in self.claimed.values())

    def blame(self, problem: str) -> PluginError:
        """The error of the plugin whose claim cannot be met; ``problem`` starts with the weight."""
        owner = self.claimed[problem.partition(" ")[0]].owner
        return PluginError(owner, HOOK, ConfigError(problem))


def native_host(hooks: HookManager) -> NativeHost | None:
    """The native side of an activation; None if no plugin needs it.

    Raises:
        IncompatibleError: The engine cannot be hooked, and errors are to be raised. With
            ``on_error = "log"`` that is one line, and contexts stay vanilla.
    """
    if not (hooks.listens(HOOK) or hooks.listens("llmaas_native_context")):
        return None
    try:
        return NativeHost(hooks, load_library())
    except IncompatibleError as error:
        if hooks.raises:
            raise
        _log.error("%s", error)
        return None


class NativeHost:
    """Models with claimed weights, and contexts on the native backend."""

    def __init__(self, hooks: HookManager, library: Library) -> None:
        """Attach to the plugins of one activation, and put the backend in ggml's registry."""
        self._hooks, self._library = hooks, library
        self._ffi, self._lib = library
        self._models: dict[int, _Model] = {}
        self._contexts: dict[int, Context] = {}
        self._is_registered = True
        self._lib.llmaas_register()

    # -- models ---------------------------------------------------------------------------------

    def load(self, load: ModelLoad, paths: list[str], original: Callable[[Any], Any]) -> Any:
        """Load a model with the weights that plugins claim.

        Args:
            load: What is loaded, after the plugins' edits.
            paths: Its files.
            original: Loads it with the parameters it is given.

        Raises:
            ConfigError: Two plugins claim the same property of a weight.
            PluginError: A claim cannot be met, and errors are to be raised. With
                ``on_error = "log"`` the model is loaded without any claims.
        """
        model = self._claimed(load, paths)
        if model is None:
            return self._loading(self._ffi.NULL, lambda: original(load.params))
        params, _kept = self._edited(load.params, model)
        loaded = self._loading(model.table, lambda: original(params))
        if loaded is None:
            return None
        problem = self._problem(model, is_created=False)
        if problem is not None:
            llama_cpp.llama_model_free(loaded)
            self._hooks.handle(problem)
            return self._loading(self._ffi.NULL, lambda: original(load.params))
        self._models[int(loaded)] = model
        return loaded

    def forget_model(self, model: int) -> None:
        """A model is about to go."""
        self._models.pop(model, None)

    def _loading(self, table: Any, load: Callable[[], Any]) -> Any:
        self._lib.llmaas_load_begin(table)
        try:
            return load()
        finally:
            self._lib.llmaas_load_end()

    def _claimed(self, load: ModelLoad, paths: list[str]) -> _Model | None:
        if not self._hooks.listens(HOOK):
            return None
        places = tensor_places(self._library, paths)
        if not places:
            return None
        claims = self._hooks.weights(load, {name: at.info for name, at in places.items()})
        if not claims:
            return None
        claimed, wrong = resolve(claims, places)
        for error in wrong:
            self._hooks.handle(error)
        return self._model(claimed, places) if claimed else None

    def _model(self, claimed: dict[str, Resolved], places: dict[str, Place]) -> _Model:
        table = self._lib.llmaas_weights_new()
        if table == self._ffi.NULL:
            raise MemoryError("no memory for a weight table")
        table = self._ffi.gc(table, self._lib.llmaas_weights_release)
        fill_table(self._library, table, claimed, places)
        return _Model(table, claimed)

    def _edited(self, params: Any, model: _Model) -> tuple[Any, object]:
        """A copy of the app's parameters with our overrides before its own, and what to keep."""
        names = [name for name, found in model.claimed.items() if found.source]
        if not names:
            return params, None
        buft = int(self._ffi.cast("uintptr_t", self._lib.llmaas_buffer_type()))
        entries = [_Override(pattern.encode(), buft) for pattern in overrides(names)]
        own = ctypes.cast(params.tensor_buft_overrides, ctypes.POINTER(_Override))
        i = 0
        while own and own[i].pattern is not None:
            entries.append(own[i])
            i += 1
        array = (_Override * (len(entries) + 1))(*entries)
        edited = type(params).from_buffer_copy(params)
        edited.tensor_buft_overrides = ctypes.cast(array, ctypes.c_void_p).value
        return edited, array

    def _problem(self, model: _Model, *, is_created: bool) -> PluginError | None:
        problem = self._lib.llmaas_weights_problem(model.table, is_created)
        if problem == self._ffi.NULL:
            return None
        return model.blame(self._ffi.string(problem).decode())

    # -- contexts -------------------------------------------------------------------------------

    def create(self, model: int, params: Any, original: Callable[[Any], Any]) -> Any:
        """Create a context on the native backend.

        Args:
            model: Address of its model.
            params: A copy of the app's parameters; may be edited.
            original: Creates it with the parameters it is given.

        Raises:
            PluginError: A claim on its model cannot be met in a graph, and errors are to be raised,
                or the weights are where vanilla could not use them.
        """
        found = self._models.get(model)
        own_buffers = found is not None and found.has_own_buffers
        if own_buffers and params.flash_attn_type == _FLASH_ATTENTION_AUTO:
            # What it means on a CPU; llama.cpp itself would turn it off, as the layers' device is
            # not the one that takes these weights.
            params.flash_attn_type = _FLASH_ATTENTION_ON
        table = self._ffi.NULL if found is None else found.table
        ctx, engine = self._creating(table, lambda: original(params))
        if ctx is None:
            return None
        problem = None if found is None else self._problem(found, is_created=True)
        if problem is not None:
            llama_cpp.llama_free(ctx)
            if own_buffers:
                raise problem
            self._hooks.handle(problem)
            table = self._ffi.NULL
            ctx, engine = self._creating(table, lambda: original(params))
        if ctx is not None and engine != self._ffi.NULL:
            self._contexts[int(ctx)] = Context(self._library, engine, int(ctx), model, table)
        return ctx

    def opened(self, ctx: int) -> None:
        """Tell the plugins of a new context."""
        context = self._contexts.get(ctx)
        if context is not None:
            self._hooks.native_context(context)

    def is_sparse(self, ctx: int) -> bool:
        """Whether a context's tokens leave values out now."""
        context = self._contexts.get(ctx)
        return context is not None and context.is_sparse

    def failed(self, ctx: int) -> None:
        """Say why a batch could not be computed, if that is known."""
        context = self._contexts.get(ctx)
        with contextlib.suppress(ReferenceError):  # freed meanwhile
            failure = None if context is None else context.failure()
            if failure is not None:
                _log.error("llama_decode failed: %s.", failure)

    def forget_context(self, ctx: int) -> None:
        """A context is about to go."""
        context = self._contexts.pop(ctx, None)
        if context is not None:
            context.close()

    def _creating(self, table: Any, create: Callable[[], Any]) -> tuple[Any, Any]:
        self._lib.llmaas_create_begin(table)
        ctx = None
        try:
            ctx = create()
        finally:
            engine = self._lib.llmaas_create_end()
        return ctx, engine

    def close(self) -> None:
        """Detach from every context: those that are still open pass their graphs through.

        The backend leaves ggml's registry. Idempotent.
        """
        for ctx in list(self._contexts):
            self.forget_context(ctx)
        if self._is_registered:
            self._is_registered = False
            self._lib.llmaas_unregister()

    def report(self) -> dict[str, Any]:
        """Counters of every open context."""
        reports = []
        for context in list(self._contexts.values()):
            with contextlib.suppress(ReferenceError):  # freed meanwhile
                reports.append({"level": context.level} | context.stats())
        return {"contexts": reports}
