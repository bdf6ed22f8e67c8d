"""Wrappers of calls that change what a model computes: warm-up and training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp

from llmaas_patches.cell_tracker import address
from llmaas_patches.host import Host

__all__ = ["wrap_training", "wrap_warmup"]

Function = Callable[..., Any]


def wrap_warmup(host: Host, original: Function) -> Function:
    """Wrap ``llama_set_warmup``: cells evaluated during a warm-up are unexplained.

    A warm-up uses all experts of a mixture, so its cells differ from those of a prompt.
    """

    @functools.wraps(original)
    def llama_set_warmup(ctx: Any, warmup: Any) -> None:
        host.background.settle(address(ctx))
        tracker = host.trackers.get(address(ctx))
        if tracker is not None:
            tracker.is_warming_up = True  # first, and reset last: Ctrl-C may come in between
        original(ctx, warmup)
        if tracker is not None:
            tracker.is_warming_up = bool(address(warmup))

    return llama_set_warmup


def wrap_training(host: Host, original: Function) -> Function:
    """Wrap ``llama_opt_epoch``, which changes the model's weights and all cells of a context.

    All open contexts of the model count as altered. For contexts that are created later, the
    model's file no longer tells what they compute, so its record is dropped.
    """

    @functools.wraps(original)
    def llama_opt_epoch(ctx: Any, *args: Any) -> None:
        tracker = host.trackers.get(address(ctx))
        if tracker is not None:
            tracker.end_paused()
        host.background.settle(address(ctx))
        _forget_model(host, address(llama_cpp.llama_get_model(ctx)), original.__name__)
        if tracker is None:
            original(ctx, *args)
            return
        with host.call(tracker):
            tracker.changed(0)
            tracker.give_up_parked()
            original(ctx, *args)

    return llama_opt_epoch


def _forget_model(host: Host, model: int, call: str) -> None:
    host.loads.pop(model, None)
    for ctx in host.lifetimes.contexts_of(model):
        tracker = host.trackers.get(ctx)
        if tracker is not None:
            tracker.alterations.append(call)
