"""Wrappers of calls that read or change cells: wait for deferred work, and track the cells."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from llama_cpp import Llama, LlamaState

from llmaas_hooks import LlmaasError, request_scope
from llmaas_patches.cell_tracker import CellTracker, address
from llmaas_patches.drafting import Drafting
from llmaas_patches.host import Host

__all__ = [
    "Around",
    "Change",
    "Function",
    "around_everything",
    "wrap_altering",
    "wrap_changing",
    "wrap_eval",
    "wrap_load_state",
    "wrap_replacing",
    "wrap_reset",
    "wrap_save_state",
    "wrap_settled",
    "wrap_shown",
    "wrap_whole",
]

Function = Callable[..., Any]
_NO_BLOCK = nullcontext()
Change = Callable[..., int | None]
"""Function from a call's arguments to the first position of sequence 0 that the call changes, or
None."""
Around = Callable[[CellTracker, Function, tuple[Any, ...]], Any]
"""Function that makes an app's call on a context to which plugins added sequences."""


def wrap_settled(host: Host, original: Function) -> Function:
    """Wrap any call on a context or its memory: wait for deferred work on it first."""
    pending, settle = host.background.pending, host.background.settle

    @functools.wraps(original)
    def settled(handle: Any, *args: Any) -> Any:
        if pending:
            settle(address(handle))
        return original(handle, *args)

    return settled


def wrap_changing(host: Host, original: Function, change: Change, around: Around) -> Function:
    """Wrap a call that changes a context's cells: wait for deferred work, and record the change."""
    return _noted(host, original, lambda tracker, args: tracker.changed(change(*args)), around)


def wrap_altering(host: Host, original: Function) -> Function:
    """Wrap a call that changes how a context computes cells: wait, and record the call."""
    name = original.__name__
    return _noted(
        host, original, lambda tracker, _: tracker.alterations.append(name), around_everything
    )


def wrap_whole(host: Host, original: Function) -> Function:
    """Wrap a call that reads all of a context's cells: wait for deferred work first.

    It is refused while other requests lie aside in some of the cells, as by ``wrap_replacing``.
    """
    return _refused_aside(host, _noted(host, original, lambda *_: None, around_everything))


def wrap_replacing(host: Host, original: Function) -> Function:
    """Wrap a call that replaces all of a context's cells: wait for deferred work first."""
    return _refused_aside(
        host, _noted(host, original, lambda tracker, _: tracker.changed(0), around_everything)
    )


def wrap_shown(host: Host, original: Function) -> Function:
    """Wrap a call that reads the cells of a sequence: wait for deferred work first.

    Sequence 0 then has the cells of the app's own request.
    """
    return _noted(host, original, lambda *_: None, _around_own)


def around_everything(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
    """Handle a call that shows or replaces all cells: remove plugins' sequences first."""
    tracker.give_up_parked()
    return _around_own(tracker, original, args)


def _around_own(tracker: CellTracker, original: Function, args: tuple[Any, ...]) -> Any:
    tracker.give_up_seats()
    return original(*args)


def _refused_aside(host: Host, wrapped: Function) -> Function:
    @functools.wraps(wrapped)
    def refused_aside(handle: Any, *args: Any) -> Any:
        _require_none_aside(host, handle, wrapped.__name__)
        return wrapped(handle, *args)

    return refused_aside


def _require_none_aside(host: Host, ctx: Any, call: str) -> None:
    """Refuse a call on all cells of a context while requests lie aside in some of them.

    Raises:
        LlmaasError: There are such requests.
    """
    tracker = host.trackers.get(address(ctx))
    if tracker is None or tracker.seats is None:
        return
    host.leave_seats(tracker.handles[0])
    if n := len(tracker.aside):
        raise LlmaasError(
            f"{call} would show or replace the cells of other requests: {n} of this engine "
            f"{'lies' if n == 1 else 'lie'} aside; call it when they have ended"
        )


def _noted(
    host: Host,
    original: Function,
    note: Callable[[CellTracker, tuple[Any, ...]], None],
    around: Around,
) -> Function:
    pending, settle, trackers = host.background.pending, host.background.settle, host.trackers

    @functools.wraps(original)
    def noted(handle: Any, *args: Any) -> Any:
        tracker = trackers.get(address(handle))
        if tracker is None:
            return original(handle, *args)
        tracker.n_calls += 1  # as `host.call`, which takes longer
        try:
            if pending:
                settle(address(handle))
            tracker.make_way()
            note(tracker, args)
            if tracker.hides and not tracker.is_lent:
                return around(tracker, original, (handle, *args))
            return original(handle, *args)
        finally:
            tracker.n_calls -= 1
            if tracker.must_free_parked:
                host.free_at_end(tracker)

    return noted


def wrap_eval(host: Host, original: Function) -> Function:
    """Wrap ``Llama.eval``: its cells are explained if all cells before them are.

    Cells of a warm-up are not.
    """
    trackers = host.trackers

    @functools.wraps(original)
    def eval(self: Llama, tokens: Any) -> None:  # noqa: A001  the original's name
        tracker = trackers.get(address(self.ctx))
        if tracker is None:
            original(self, tokens)
            return
        if tracker.due:
            tracker.end_paused()
        tracker.make_way()
        start, ctx, n_tokens = self.n_tokens, address(self.ctx), len(tokens)
        drafting = self.draft_model if isinstance(self.draft_model, Drafting) else None
        began = 0.0 if drafting is None else time.perf_counter()
        tracker.is_evaluating = True
        try:
            with _NO_BLOCK if host.native is None else host.native.batch_of(ctx, n_tokens):
                original(self, tokens)
            if drafting is not None:
                drafting.evaluated(n_tokens, time.perf_counter() - began)
        except BaseException:
            self._requires_eval = True  # the logits may be of an unrecorded batch
            raise
        finally:
            tracker.is_evaluating = False
            if start <= tracker.n_explained and not tracker.is_warming_up:
                tracker.n_explained = self.n_tokens  # also after an error: the part that succeeded
            if n_tokens == 1 and host.native is not None and host.native.is_sparse(ctx):
                tracker.evaluated_sparsely(start)

    return eval


def wrap_reset(host: Host, original: Function) -> Function:
    """Wrap ``Llama.reset``: the emptied records now belong to the current app."""
    prepares = host.hooks.listens("llmaas_app_batch")

    @functools.wraps(original)
    def reset(self: Llama) -> None:
        tracker = host.trackers.get(address(self.ctx))
        if tracker is not None:
            tracker.end_paused()
            tracker.make_way()
        original(self)
        if tracker is not None:
            tracker.app = request_scope.current().app
        if prepares:  # C code may evaluate the next batch
            host.app_batch(self.ctx)

    return reset


def wrap_save_state(host: Host, original: Function) -> Function:
    """Wrap ``Llama.save_state``: record how much of the state is explained."""

    @functools.wraps(original)
    def save_state(self: Llama) -> LlamaState:
        _require_none_aside(host, self.ctx, "Llama.save_state")
        state = original(self)
        tracker = host.trackers.get(address(self.ctx))
        if tracker is not None:
            host.states[state] = tracker.saved(state.n_tokens)
        return state

    return save_state


def wrap_load_state(host: Host, original: Function) -> Function:
    """Wrap ``Llama.load_state``: only states that the same context saved can be explained."""

    @functools.wraps(original)
    def load_state(self: Llama, state: LlamaState) -> None:
        _require_none_aside(host, self.ctx, "Llama.load_state")
        tracker = host.trackers.get(address(self.ctx))
        if tracker is not None:
            tracker.end_paused()
        original(self, state)
        if tracker is not None:
            tracker.loaded(host.states.get(state), request_scope.current().app)

    return load_state
