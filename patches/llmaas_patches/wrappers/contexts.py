"""Wrappers of the C bindings that create, describe and free contexts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate, LlmaasError
from llmaas_hooks.own_models import are_loaded_here, are_made_here
from llmaas_patches.cell_tracker import address
from llmaas_patches.host import Host
from llmaas_patches.length_warning import no_length_warning
from llmaas_patches.native import has_our_buffers

__all__ = ["wrap_free", "wrap_init_context", "wrap_n_ctx", "wrap_n_seq_max"]

Function = Callable[..., Any]


def wrap_init_context(host: Host, original: Function) -> Function:
    """Wrap ``llama_init_from_model``: let plugins edit a copy of the app's parameters.

    The wrapper raises LlmaasError if the weights are where only an earlier activation finds them.
    """

    @functools.wraps(original)
    def llama_init_from_model(model: Any, params: Any) -> Any:
        if are_loaded_here():
            own = original(model, params)
            if own is not None:
                host.lifetimes.context_made(int(own), address(model))
            return own
        host.log_buffer.replay()
        load = host.loads.get(address(model))
        if load is None and has_our_buffers(address(model)):
            raise LlmaasError(
                "no context was created: an earlier activation keeps the model's weights, and it "
                "has ended; load the model again"
            )
        edited = type(params).from_buffer_copy(params)
        create = ContextCreate(
            address(model),
            edited,
            load,
            why_no_seats=host.why_no_seats(),
            takes_turns=host.hooks.listens("llmaas_turn"),
            is_own=are_made_here(),
        )
        host.hooks.context_create(create)
        n_spare = _add_cells(create, params)
        make = functools.partial(original, model)
        with _true_warnings(create, params, n_spare):
            ctx = _create(host, create, edited, make)
        if create.checks and not _accepted(host, create, ctx):
            if ctx is not None:
                llama_cpp.llama_free(ctx)
            own, n_spare = type(params).from_buffer_copy(params), 0
            create.n_seats = 0
            ctx = _create(host, create, own, make)
        if ctx is not None:
            host.lifetimes.context_made(int(ctx), address(model))
            host.watch(int(ctx), int(params.n_seq_max), n_spare, create.n_seats)
            _opened(host, ctx)
        return ctx

    return llama_init_from_model


def _add_cells(create: ContextCreate, params: Any) -> int:
    """Return how many cells plugins added, and keep batches within the app's own ``n_ctx``."""
    asked = _asked(create, params)
    n_spare = int(create.params.n_ctx or asked) - asked
    if n_spare:
        create.params.n_batch = min(int(create.params.n_batch), asked)
    return n_spare


def _asked(create: ContextCreate, params: Any) -> int:
    """Return the context length that the app asked for; 0 without a model, which gives none."""
    if not create.model:
        return int(params.n_ctx)
    return int(params.n_ctx or llama_cpp.llama_model_n_ctx_train(create.model))


def _true_warnings(
    create: ContextCreate, params: Any, n_spare: int
) -> contextlib.AbstractContextManager[None]:
    """Drop llama.cpp's warning of a long context if only the added cells exceed the training."""
    if not n_spare:  # an app may also pass no model
        return contextlib.nullcontext()
    is_true = _asked(create, params) > llama_cpp.llama_model_n_ctx_train(create.model)
    return contextlib.nullcontext() if is_true else no_length_warning()


def _create(host: Host, create: ContextCreate, params: Any, make: Function) -> Any:
    if host.native is None:
        return make(params)
    return host.native.create(create, params, make)


def _opened(host: Host, ctx: Any) -> None:
    """Announce a new context to the plugins; free it if that fails."""
    if host.native is None:
        return
    try:
        host.native.opened(int(ctx))
    except BaseException:
        llama_cpp.llama_free(ctx)
        raise


def _accepted(host: Host, create: ContextCreate, ctx: Any) -> bool:
    """Return whether every plugin can use the context that it edited."""
    if ctx is None:
        return False
    try:
        return host.hooks.accept(create, ctx)
    except BaseException:
        llama_cpp.llama_free(ctx)
        raise


def wrap_free(host: Host, original: Function) -> Function:
    """Wrap ``llama_free``: free a context after its deferred work, waiting only where possible."""

    @functools.wraps(original)
    def llama_free(ctx: Any) -> None:
        if not address(ctx):
            original(ctx)
            return
        host.free_context(address(ctx), functools.partial(original, ctx))

    return llama_free


def wrap_n_ctx(host: Host, original: Function) -> Function:
    """Wrap ``llama_n_ctx`` and ``llama_n_ctx_seq``: hide the cells that plugins added."""

    @functools.wraps(original)
    def llama_n_ctx(ctx: Any) -> int:
        tracker = host.trackers.get(address(ctx))
        return int(original(ctx)) if tracker is None else int(original(ctx)) - tracker.n_spare

    return llama_n_ctx


def wrap_n_seq_max(host: Host, original: Function) -> Function:
    """Wrap ``llama_n_seq_max``: return the number that the app asked for."""

    @functools.wraps(original)
    def llama_n_seq_max(ctx: Any) -> int:
        tracker = host.trackers.get(address(ctx))
        return int(original(ctx)) if tracker is None else tracker.app_n_seq_max

    return llama_n_seq_max
