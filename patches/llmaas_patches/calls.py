"""Wrappers over the C bindings for loading, contexts, decoding and sampling.

Each wrapper forwards its arguments unchanged, and does nothing more if no plugin uses its hook.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate, DecodeStep, LlmaasError, LogitsView, ModelLoad
from llmaas_patches.host import Host
from llmaas_patches.ledger import address
from llmaas_patches.loading import look_at, model_load
from llmaas_patches.native import has_our_buffers
from llmaas_patches.native.claims import split_paths

__all__ = [
    "wrap_decode",
    "wrap_free",
    "wrap_free_model",
    "wrap_init_context",
    "wrap_load_model",
    "wrap_load_splits",
    "wrap_n_ctx",
    "wrap_n_seq_max",
    "wrap_sample",
    "wrap_settled",
]

Function = Callable[..., Any]


def wrap_load_model(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_load_from_file``: let plugins edit the parameters."""

    @functools.wraps(original)
    def llama_model_load_from_file(path_model: Any, params: Any) -> Any:
        path = os.fsdecode(path_model)
        return _load(host, path, params, None, lambda params: original(path_model, params))

    return llama_model_load_from_file


def wrap_load_splits(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_load_from_splits``: let plugins edit the parameters.

    The path of the first file names the model.
    """

    @functools.wraps(original)
    def llama_model_load_from_splits(paths: Any, n_paths: Any, params: Any) -> Any:
        files = [os.fsdecode(paths[i]) for i in range(n_paths)]
        load = functools.partial(original, paths, n_paths)
        return _load(host, files[0], params, files, load)

    return llama_model_load_from_splits


def _load(
    host: Host, path: str, params: Any, files: list[str] | None, original: Callable[[Any], Any]
) -> Any:
    load = ModelLoad(path, params, look_at(files or split_paths(path)))
    host.lifetimes.settle()
    with host.silence.kept():
        host.hooks.model_load(load)
        if host.native is None:
            model = original(params)
        else:
            model = host.native.load(load, files or split_paths(path), original)
    if model is not None:
        is_claimed = host.native is not None and host.native.has_claims(int(model))
        host.loads[int(model)] = model_load(
            load, int(model), is_listed=files is not None, is_claimed=is_claimed
        )
    return model


def wrap_free_model(host: Host, original: Function) -> Function:
    """Wrap ``llama_model_free``: free a model only after its contexts."""

    @functools.wraps(original)
    def llama_model_free(model: Any) -> None:
        if not address(model):
            original(model)
            return
        host.free_model(address(model), functools.partial(original, model))

    return llama_model_free


def wrap_init_context(host: Host, original: Function) -> Function:
    """Wrap ``llama_init_from_model``: let plugins edit a copy of the app's parameters.

    The wrapper raises LlmaasError if the weights are where only an earlier activation finds them.
    """

    @functools.wraps(original)
    def llama_init_from_model(model: Any, params: Any) -> Any:
        host.silence.end()
        load = host.loads.get(address(model))
        if load is None and has_our_buffers(address(model)):
            raise LlmaasError(
                "no context was created: an earlier activation keeps the model's weights, and it "
                "has ended; load the model again"
            )
        edited = type(params).from_buffer_copy(params)
        create = ContextCreate(address(model), edited, load)
        host.hooks.context_create(create)
        n_spare = _add_cells(create, params)
        ctx = _create(host, model, edited, original)
        if create.checks and not _accepted(host, create, ctx):
            if ctx is not None:
                llama_cpp.llama_free(ctx)
            own, n_spare = type(params).from_buffer_copy(params), 0
            ctx = _create(host, model, own, original)
        if ctx is not None:
            host.lifetimes.context_made(int(ctx), address(model))
            host.watch(int(ctx), int(params.n_seq_max), n_spare)
            _opened(host, ctx)
        return ctx

    return llama_init_from_model


def _add_cells(create: ContextCreate, params: Any) -> int:
    """Return how many cells plugins added, and keep batches within the app's own ``n_ctx``."""
    asked = int(params.n_ctx) or llama_cpp.llama_model_n_ctx_train(create.model)
    n_spare = int(create.params.n_ctx or asked) - asked
    if n_spare:
        create.params.n_batch = min(int(create.params.n_batch), asked)
    return n_spare


def _create(host: Host, model: Any, params: Any, original: Function) -> Any:
    if host.native is None:
        return original(model, params)
    return host.native.create(address(model), params, functools.partial(original, model))


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


def _say_why(host: Host, ctx: Any) -> None:
    """Log why a batch failed, as the app only gets a number."""
    if host.native is not None:
        host.native.failed(address(ctx))


def wrap_decode(host: Host, original: Function) -> Function:
    """Wrap ``llama_decode``: wait for deferred work, and time the batch if a plugin listens."""
    pending, settle, ledgers = host.lanes.pending, host.lanes.settle, host.ledgers
    with_more_outputs, native = host.with_more_outputs, host.native
    listens = host.hooks.listens("llmaas_decode")
    keeps_cells = any(map(host.hooks.listens, ("llmaas_kv_save", "llmaas_kv_restore")))

    @functools.wraps(original)
    def llama_decode(ctx: Any, batch: Any) -> Any:
        if pending:
            settle(address(ctx))
        if with_more_outputs and address(ctx) in with_more_outputs:
            ledger = ledgers.get(address(ctx))
            if ledger is None or not ledger.is_evaluating:  # the app's own batch
                with_more_outputs.discard(address(ctx))
        if keeps_cells and (ledger := ledgers.get(address(ctx))) is not None:
            ledger.decoded(batch)
            if ledger.n_spare and ledger.is_full(batch):
                return 1  # llama.cpp's status for a full context of the app's size
        started = time.perf_counter() if listens else 0.0
        if native is None or batch.n_tokens == 1:
            result = original(ctx, batch)
        else:
            with native.batch_of(address(ctx), batch.n_tokens):
                result = original(ctx, batch)
        if result < 0:
            _say_why(host, ctx)
        elif listens and result == 0:
            seconds = time.perf_counter() - started
            host.hooks.decode(DecodeStep(address(ctx), int(batch.n_tokens), seconds))
        return result

    return llama_decode


def wrap_settled(host: Host, original: Function) -> Function:
    """Wrap any call on a context or its memory: wait for deferred work on it first."""
    pending, settle = host.lanes.pending, host.lanes.settle

    @functools.wraps(original)
    def settled(handle: Any, *args: Any) -> Any:
        if pending:
            settle(address(handle))
        return original(handle, *args)

    return settled


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
        ledger = host.ledgers.get(address(ctx))
        return int(original(ctx)) if ledger is None else int(original(ctx)) - ledger.n_spare

    return llama_n_ctx


def wrap_n_seq_max(host: Host, original: Function) -> Function:
    """Wrap ``llama_n_seq_max``: return the number that the app asked for."""

    @functools.wraps(original)
    def llama_n_seq_max(ctx: Any) -> int:
        ledger = host.ledgers.get(address(ctx))
        return int(original(ctx)) if ledger is None else ledger.app_n_seq_max

    return llama_n_seq_max


def wrap_sample(host: Host, original: Function) -> Function:
    """Wrap ``llama_sampler_sample``: let plugins edit the engine's logits row in place."""
    pending, settle = host.lanes.pending, host.lanes.settle
    listens = host.hooks.listens("llmaas_logits")

    @functools.wraps(original)
    def llama_sampler_sample(smpl: Any, ctx: Any, idx: int) -> Any:
        if pending:
            settle(address(ctx))
        if not listens:
            return original(smpl, ctx, idx)
        row = llama_cpp.llama_get_logits_ith(ctx, idx)
        if row:
            vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
            shape = (llama_cpp.llama_vocab_n_tokens(vocab),)
            logits = np.ctypeslib.as_array(row, shape=shape)
            host.hooks.logits(LogitsView(address(ctx), int(idx), logits))
        return original(smpl, ctx, idx)

    return llama_sampler_sample
