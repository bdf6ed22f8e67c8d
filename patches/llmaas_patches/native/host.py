"""Load, create and free models and contexts on the native backend."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterable
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import (
    ConfigError,
    ContextCreate,
    HookManager,
    IncompatibleError,
    MemoryClaim,
    ModelFile,
    ModelLoad,
    PluginError,
)
from llmaas_patches.loading import replaced
from llmaas_patches.native.backend_context import BackendContext
from llmaas_patches.native.claims import (
    HOOK,
    Place,
    Resolved,
    fill_table,
    overrides,
    resolve,
    tensor_places,
)
from llmaas_patches.native.library import Library, load_library
from llmaas_patches.native.memory import engine_memory

__all__ = ["NativeHost", "native_host"]

_log = logging.getLogger("llmaas.patches")
_FLASH_ATTENTION_AUTO, _FLASH_ATTENTION_ON = -1, 1


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``: a buffer type for weights whose names match."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class _Model:
    """A loaded model's weight table, and the claims in it."""

    def __init__(self, table: Any, claimed: dict[str, Resolved]) -> None:
        self.table = table
        self.claimed = claimed

    @property
    def has_own_buffers(self) -> bool:
        return any(found.source for found in self.claimed.values())

    @property
    def n_levels(self) -> int:
        """Number of levels of the claimed parts; 1 without any."""
        parts = [found.part[1] for found in self.claimed.values() if found.part]
        return max((len(part.rows or part.columns) for part in parts), default=1)

    def unlike(self, files: Iterable[ModelFile]) -> PluginError | None:
        """Return an error if one of the files changed since its stamp was taken, or None."""
        path = replaced(files)
        if path is None:
            return None
        owner = next(iter(self.claimed.values())).owner
        problem = f"{path} was replaced or changed while it was loaded; load the model again"
        return PluginError(owner, HOOK, ConfigError(problem))

    def other_files(self) -> set[ModelFile]:
        """Return files other than the model's that weights are read from, as plugins saw them."""
        claims = [found.source[1] for found in self.claimed.values() if found.source]
        return {ModelFile(one.path, one.stamp) for one in claims if one.path and one.stamp}

    def blame(self, problem: str) -> PluginError:
        """Return the error of the plugin whose claim failed; ``problem`` begins with the weight."""
        owner = self.claimed[problem.partition(" ")[0]].owner
        return PluginError(owner, HOOK, ConfigError(problem))


def native_host(hooks: HookManager) -> NativeHost | None:
    """Create the native backend of an activation; return None if no plugin needs it.

    Raises:
        IncompatibleError: The engine cannot be hooked, and errors are to be raised. With
            ``on_error = "log"`` the error is only logged, and contexts stay vanilla.
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
        """Attach to the plugins of one activation, and register the backend with ggml."""
        self._hooks, self._library = hooks, library
        self._ffi, self._lib = library
        self._models: dict[int, _Model] = {}
        self._contexts: dict[int, BackendContext] = {}
        self._is_registered = True
        self._lib.llmaas_register()

    # -- models ---------------------------------------------------------------------------------

    def load(self, load: ModelLoad, paths: list[str], original: Callable[[Any], Any]) -> Any:
        """Load a model with the weights that plugins claim.

        Args:
            load: Model to load, after the plugins' edits.
            paths: Files of the model.
            original: Function that loads the model with the given parameters.

        Raises:
            ConfigError: Two plugins claim the same property of a weight.
            PluginError: A claim cannot be met, and errors are to be raised. With
                ``on_error = "log"`` the model is loaded without any claims.
        """
        own = type(load.params).from_buffer_copy(load.params)
        model = self._claimed(load, paths)
        if model is None:
            return self._loading(self._ffi.NULL, lambda: original(load.params))
        problem = model.unlike(model.other_files())  # the table has opened them by now
        if problem is None:
            params, _kept = self._edited(load.params, model)
            loaded = self._loading(model.table, lambda: original(params))
            if loaded is None:
                return None
            problem = self._problem(model, is_created=False) or model.unlike(load.files)
            if problem is None:
                self._models[int(loaded)] = model
                return loaded
            llama_cpp.llama_model_free(loaded)
        self._hooks.handle(problem)
        return self._loading(self._ffi.NULL, lambda: original(own))

    def has_claims(self, model: int) -> bool:
        """Return whether a model was loaded with the weights that plugins claimed."""
        return model in self._models

    def forget_model(self, model: int) -> None:
        """Drop the record of a model that is about to be freed."""
        self._models.pop(model, None)

    def _loading(self, table: Any, load: Callable[[], Any]) -> Any:
        self._lib.llmaas_load_begin(table)
        model = None
        try:
            model = load()
        finally:
            self._lib.llmaas_load_end(self._ffi.cast("void *", int(model or 0)))
        return model

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
            raise MemoryError("not enough memory for a weight table")
        table = self._ffi.gc(table, self._lib.llmaas_weights_release)
        fill_table(self._library, table, claimed, places)
        return _Model(table, {name: found.bare() for name, found in claimed.items()})

    def _edited(self, params: Any, model: _Model) -> tuple[Any, object]:
        """Return parameters with our overrides before the app's, and an object to keep alive."""
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

    def create(self, create: ContextCreate, params: Any, original: Callable[[Any], Any]) -> Any:
        """Create a context on the native backend.

        Args:
            create: The context's model, and how it was opened.
            params: Copy of the app's parameters, which may be edited.
            original: Function that creates the context with the given parameters.

        Raises:
            PluginError: A claim on the model cannot be met in a graph, and either errors are to be
                raised or the weights are where vanilla cannot use them.
        """
        found = self._models.get(create.model)
        own_buffers = found is not None and found.has_own_buffers
        if own_buffers and params.flash_attn_type == _FLASH_ATTENTION_AUTO:
            # "Auto" means "on" on a CPU. llama.cpp would turn it off here, because the device of
            # the layers is not the one that takes these weights.
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
            made = BackendContext(self._library, engine, int(ctx), create, table)
            made.streamed_bytes = made.file_weights().stats()["bytes"]
            if found is not None and table != self._ffi.NULL:
                made.n_levels = found.n_levels
            self._contexts[int(ctx)] = made
        return ctx

    def opened(self, ctx: int) -> None:
        """Announce a new context to the plugins."""
        context = self._contexts.get(ctx)
        if context is not None:
            self._hooks.native_context(context)

    def level(self, ctx: int) -> int:
        """Return the index of a context's level; 0 for a context that has none."""
        context = self._contexts.get(ctx)
        return 0 if context is None else context.level

    def unobserved(self, ctx: int, level: int) -> contextlib.AbstractContextManager[None]:
        """Compute a context's batches in the block at a level, and hide them from taps.

        Raises:
            ReferenceError: The context has no native one.
        """
        context = self._contexts.get(ctx)
        if context is None:
            raise ReferenceError("the context was freed or the suite was deactivated")
        return context.unobserved(level)

    def forget_calls(self) -> None:
        """End other threads' ``unobserved`` blocks in a child, which lacks these threads."""
        for context in list(self._contexts.values()):
            context.observe()

    def is_sparse(self, ctx: int) -> bool:
        """Return whether a context computes batches of one token sparsely."""
        context = self._contexts.get(ctx)
        return context is not None and context.is_sparse

    def batch_of(self, ctx: int, n_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Compute a batch of several tokens exactly, however it is split."""
        context = self._contexts.get(ctx) if n_tokens > 1 else None
        if context is None or not context.is_sparse:
            return contextlib.nullcontext()
        return context.whole_batch()

    def failed(self, ctx: int) -> None:
        """Log why a batch could not be computed, if that is known."""
        context = self._contexts.get(ctx)
        with contextlib.suppress(ReferenceError):  # freed meanwhile
            failure = None if context is None else context.failure()
            if failure is not None:
                _log.error("llama_decode failed: %s.", failure)

    def forget_context(self, ctx: int) -> None:
        """Detach from a context that is about to be freed."""
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
        """Detach from every context and unregister the backend; idempotent.

        Contexts that are still open continue to compute, without any change to their graphs.
        """
        for ctx in list(self._contexts):
            self.forget_context(ctx)
        if self._is_registered:
            self._is_registered = False
            self._lib.llmaas_unregister()

    def memory(self) -> list[MemoryClaim]:
        """Return the claims of every open context and its model."""
        return engine_memory(list(self._contexts.values()))

    def report(self) -> dict[str, Any]:
        """Return counters of every open context."""
        reports = []
        for context in list(self._contexts.values()):
            with contextlib.suppress(ReferenceError):  # freed meanwhile
                reports.append({"level": context.level} | context.stats())
        return {"contexts": reports}
