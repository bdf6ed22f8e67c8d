"""Wrappers over the C bindings: load, context, decode, sampling, and the waiting ones.

Each forwards its arguments untouched and adds nothing when nobody listens.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate, DecodeStep, LogitsView, ModelLoad
from llmaas_patches.host import Host

__all__ = [
    "wrap_decode",
    "wrap_free",
    "wrap_init_context",
    "wrap_load_model",
    "wrap_n_seq_max",
    "wrap_sample",
    "wrap_seq_rm",
    "wrap_seq_shift",
    "wrap_settled",
]

Function = Callable[..., Any]


def wrap_load_model(host: Host, original: Function) -> Function:
    """``llama_model_load_from_file``: let plugins edit the parameters."""

    @functools.wraps(original)
    def llama_model_load_from_file(path_model: Any, params: Any) -> Any:
        host.hooks.model_load(ModelLoad(os.fsdecode(path_model), params))
        return original(path_model, params)

    return llama_model_load_from_file


def wrap_init_context(host: Host, original: Function) -> Function:
    """``llama_init_from_model``: plugins edit a copy, so the app's own structure stays vanilla."""

    @functools.wraps(original)
    def llama_init_from_model(model: Any, params: Any) -> Any:
        edited = type(params).from_buffer_copy(params)
        host.hooks.context_create(ContextCreate(int(model), edited))
        ctx = original(model, edited)
        if ctx is not None:
            host.app_n_seq_max[int(ctx)] = int(params.n_seq_max)
        return ctx

    return llama_init_from_model


def wrap_decode(host: Host, original: Function) -> Function:
    """``llama_decode``: wait for deferred work, and time the batch if somebody listens."""
    pending, settle = host.lanes.pending, host.lanes.settle
    decoded = host.ownership.decoded
    listens = host.hooks.listens("llmaas_decode")

    @functools.wraps(original)
    def llama_decode(ctx: Any, batch: Any) -> Any:
        if pending:
            settle(ctx)
        decoded(ctx, batch)
        if not listens:
            return original(ctx, batch)
        started = time.perf_counter()
        result = original(ctx, batch)
        if result == 0:
            seconds = time.perf_counter() - started
            host.hooks.decode(DecodeStep(int(ctx), int(batch.n_tokens), seconds))
        return result

    return llama_decode


def wrap_settled(host: Host, original: Function) -> Function:
    """Any call on a context or its memory: wait for deferred work on it first."""
    pending, settle = host.lanes.pending, host.lanes.settle

    @functools.wraps(original)
    def settled(handle: Any, *args: Any) -> Any:
        if pending:
            settle(handle)
        return original(handle, *args)

    return settled


def wrap_seq_rm(host: Host, original: Function) -> Function:
    """``llama_memory_seq_rm``: ``Llama`` cuts ends off, only an app makes holes."""
    settled = wrap_settled(host, original)

    @functools.wraps(original)
    def llama_memory_seq_rm(mem: Any, seq_id: Any, p0: Any, p1: Any) -> Any:
        if getattr(p1, "value", p1) >= 0:
            host.ownership.edited(mem)
        return settled(mem, seq_id, p0, p1)

    return llama_memory_seq_rm


def wrap_seq_shift(host: Host, original: Function) -> Function:
    """``llama_memory_seq_add`` and ``_div``: only an app gives cells other positions."""
    settled = wrap_settled(host, original)

    @functools.wraps(original)
    def shift(mem: Any, *args: Any) -> Any:
        host.ownership.edited(mem)
        return settled(mem, *args)

    return shift


def wrap_free(host: Host, original: Function) -> Function:
    """``llama_free``: deferred work must be over before the context is."""

    @functools.wraps(original)
    def llama_free(ctx: Any) -> None:
        host.lanes.settle(ctx)
        host.app_n_seq_max.pop(ctx, None)
        host.ownership.forget(ctx)
        original(ctx)

    return llama_free


def wrap_n_seq_max(host: Host, original: Function) -> Function:
    """``llama_n_seq_max``: the app reads the number it asked for, not ours."""

    @functools.wraps(original)
    def llama_n_seq_max(ctx: Any) -> int:
        found = host.app_n_seq_max.get(ctx)
        return int(original(ctx)) if found is None else found

    return llama_n_seq_max


def wrap_sample(host: Host, original: Function) -> Function:
    """``llama_sampler_sample``: hand out the engine's logits row for editing in place."""
    pending, settle = host.lanes.pending, host.lanes.settle
    listens = host.hooks.listens("llmaas_logits")

    @functools.wraps(original)
    def llama_sampler_sample(smpl: Any, ctx: Any, idx: int) -> Any:
        if pending:
            settle(ctx)
        if not listens:
            return original(smpl, ctx, idx)
        row = llama_cpp.llama_get_logits_ith(ctx, idx)
        if row:
            vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
            shape = (llama_cpp.llama_vocab_n_tokens(vocab),)
            logits = np.ctypeslib.as_array(row, shape=shape)
            host.hooks.logits(LogitsView(int(ctx), int(idx), logits))
        return original(smpl, ctx, idx)

    return llama_sampler_sample
