"""Wrappers of the C bindings that evaluate batches and sample tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array

from llmaas_hooks import DecodeStep, LogitsView
from llmaas_hooks.own_models import are_made_here
from llmaas_patches.cell_tracker import CellTracker, address
from llmaas_patches.host import Host

__all__ = ["wrap_decode", "wrap_process", "wrap_sample"]

Function = Callable[..., Any]
_LAST = -1
"""Output row of the last token that gave logits."""
_SEVERAL = 2
"""Any number of tokens that is not one."""


def wrap_decode(host: Host, original: Function) -> Function:
    """Wrap ``llama_decode``: wait for deferred work, and time the batch if a plugin listens."""
    wrap = _wrap_decode_for_plugins if host.hooks.names() else _wrap_decode_without_plugins
    return wrap(host, original)


def _wrap_decode_for_plugins(host: Host, original: Function) -> Function:
    trackers = host.trackers
    keeps_cells = any(map(host.hooks.listens, ("llmaas_kv_save", "llmaas_kv_restore")))
    prepare, decode = _preparation(host), _timed(host, original)

    @functools.wraps(original)
    def llama_decode(ctx: Any, batch: Any) -> Any:
        tracker = trackers.get(address(ctx))
        if tracker is None:
            prepare(ctx, None)
            return decode(ctx, batch, batch.n_tokens)
        tracker.n_calls += 1
        try:
            seats = tracker.seats
            if seats is not None:
                if not tracker.is_lent:
                    seated = seats.seated
                    if seated and tracker.is_evaluating and seated.evaluates(batch):
                        return 0
                    seats.give_up()
                seats.n_batches += 1
            prepare(ctx, tracker)
            n_tokens = batch.n_tokens
            if keeps_cells and (refusal := tracker.refusal(batch, n_tokens)):
                return refusal
            return decode(ctx, batch, n_tokens)
        finally:
            tracker.n_calls -= 1
            if tracker.must_free_parked:
                host.free_at_end(tracker)

    return llama_decode


def _timed(host: Host, original: Function) -> Function:
    """Return ``llama_decode`` that computes exactly what it must, and says how long it took."""
    native, tell = host.native, host.hooks.evaluated
    times_single = host.hooks.listens("llmaas_decode")
    times_several = times_single or host.hooks.listens("llmaas_prefill")

    def decode(ctx: Any, batch: Any, n_tokens: int) -> Any:
        is_timed = times_single if n_tokens == 1 else times_several
        started = time.perf_counter() if is_timed else 0.0
        if native is None or n_tokens == 1:
            result = original(ctx, batch)
        else:
            with native.batch_of(address(ctx), n_tokens):
                result = original(ctx, batch)
        if result < 0:
            _say_why(host, ctx)
        elif is_timed and result == 0 and not are_made_here():  # nobody's request
            seconds = time.perf_counter() - started
            tell(DecodeStep(address(ctx), n_tokens, seconds))
        return result

    return decode


def _wrap_decode_without_plugins(host: Host, original: Function) -> Function:
    """Wrap ``llama_decode`` for an activation that has nothing to do but to wait for other work."""
    pending, settle = host.background.pending, host.background.settle

    @functools.wraps(original)
    def llama_decode(ctx: Any, batch: Any) -> Any:
        if pending:
            settle(address(ctx))
        return original(ctx, batch)

    return llama_decode


def wrap_process(host: Host, original: Function) -> Function:
    """Wrap ``llama_encode`` and ``llama_process``, whose batches cannot be looked into.

    Plugins' sequences are freed first, because such a batch may name them.
    """
    prepare, trackers, native = _preparation(host), host.trackers, host.native

    @functools.wraps(original)
    def process(ctx: Any, *args: Any) -> Any:
        tracker = trackers.get(address(ctx))
        if tracker is None:
            prepare(ctx, None)
            return original(ctx, *args)
        exact = nullcontext() if native is None else native.batch_of(address(ctx), _SEVERAL)
        with host.call(tracker), exact:
            prepare(ctx, tracker)
            tracker.make_way()
            tracker.changed(0)
            if tracker.hides and not tracker.is_lent:
                tracker.claimed(original.__name__)
            return original(ctx, *args)

    return process


def _preparation(host: Host) -> Callable[[Any, CellTracker | None], None]:
    """Return what to do before each batch: end paused requests, wait, and announce an app's own."""
    pending, settle = host.background.pending, host.background.settle
    with_more_outputs = host.with_more_outputs
    prepares = host.hooks.listens("llmaas_app_batch")

    def prepare(ctx: Any, tracker: CellTracker | None) -> None:
        if tracker is not None and tracker.due and not (tracker.is_evaluating or tracker.is_lent):
            tracker.end_paused()
        if pending:
            settle(address(ctx))
        if prepares:
            host.app_batch(ctx)
        if with_more_outputs:
            _drop_outputs(host, address(ctx))

    return prepare


def _drop_outputs(host: Host, ctx: int) -> None:
    """Forget that a context has more logits than the app asked for, before the app's own batch."""
    tracker = host.trackers.get(ctx)
    if tracker is None or not tracker.is_evaluating:
        host.with_more_outputs.discard(ctx)


def _say_why(host: Host, ctx: Any) -> None:
    """Log why a batch failed, as the app only gets a number."""
    if host.native is not None:
        host.native.failed(address(ctx))


def wrap_sample(host: Host, original: Function) -> Function:
    """Wrap ``llama_sampler_sample``: let plugins edit the engine's logits row in place."""
    pending, settle = host.background.pending, host.background.settle
    listens, trackers = host.hooks.listens("llmaas_logits"), host.trackers

    @functools.wraps(original)
    def llama_sampler_sample(smpl: Any, ctx: Any, idx: int) -> Any:
        if pending:
            settle(address(ctx))
        tracker = trackers.get(address(ctx))
        if idx == _LAST and tracker is not None and tracker.seats is not None:
            idx = tracker.seats.row(idx)
        if not listens:
            return original(smpl, ctx, idx)
        row = llama_cpp.llama_get_logits_ith(ctx, idx)
        if row:
            vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
            shape = (llama_cpp.llama_vocab_n_tokens(vocab),)
            logits = as_array(row, shape=shape)
            host.hooks.logits(LogitsView(address(ctx), int(idx), logits))
        return original(smpl, ctx, idx)

    return llama_sampler_sample
