"""State shared by the wrappers: the hook manager, the background work, and the engines."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llama_cpp import Llama, LlamaState, llama_cpp

from llmaas_hooks import HookManager, ModelLoad, forks, request_scope
from llmaas_patches.background import BackgroundWork
from llmaas_patches.cell_tracker import CellTracker, Known, address
from llmaas_patches.collecting import Collecting
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.lifetimes import Lifetimes
from llmaas_patches.log_buffer import LogBuffer
from llmaas_patches.native import native_host
from llmaas_patches.seats import Seat, Seated, Seats

__all__ = ["Host"]

_OURS = f"{__package__}."
_FOR_ONE_REQUEST = frozenset({"llmaas_logits", "llmaas_request_resume"})
"""Hooks in which a plugin sets something up for the one request that has the engine."""


class Host(forks.Forked):
    """Shared state of the wrappers of one activation.

    Attributes:
        hooks: Hooks of the plugins.
        background: Deferred work on engines.
        collecting: Watcher of the garbage collector.
        lifetimes: Order in which contexts and models are freed.
        log_buffer: Buffer for log records while a model is loaded.
        loads: How each model opened since the activation was opened, by the model's address.
        trackers: Cell tracker of each context, by the addresses of the context and of its memory.
        states: Facts about the states that ``Llama.save_state`` returned.
        with_more_outputs: Contexts whose last batch gave logits that only plugins asked for.
        native: Native backend of this activation; None if no plugin needs it.
        batch_times: Time that small batches of each engine take (``drafting``).
        real_n_ctx, real_n_seq_max: Original bindings, which return the true numbers.
        real_decode: Original binding, which calls no hook.
    """

    def __init__(self, hooks: HookManager) -> None:
        """Attach to the plugins of one activation.

        Raises:
            IncompatibleError: A plugin needs the native backend, which cannot be loaded, and
                errors are to be raised.
        """
        self.hooks = hooks
        self.native = native_host(hooks)
        self.collecting = Collecting()
        self.background = BackgroundWork(self.collecting)
        self.lifetimes = Lifetimes(self.background, self.collecting)
        self.log_buffer = LogBuffer()
        self.loads: dict[int, ModelLoad] = {}
        self.trackers: dict[int, CellTracker] = {}
        self.states: weakref.WeakKeyDictionary[LlamaState, Known] = weakref.WeakKeyDictionary()
        self.with_more_outputs: set[int] = set()
        self.batch_times: weakref.WeakKeyDictionary[LlamaEngine, Any] = weakref.WeakKeyDictionary()
        self.real_decode: Callable[[Any, Any], int] = llama_cpp.llama_decode
        self.real_n_ctx: Callable[[Any], int] = llama_cpp.llama_n_ctx
        self.real_n_seq_max: Callable[[Any], int] = llama_cpp.llama_n_seq_max
        self._engines: weakref.WeakKeyDictionary[Llama, LlamaEngine] = weakref.WeakKeyDictionary()
        self._lock = forks.lock()
        forks.watch(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Forget calls and requests of other threads, which a child does not have.

        A child that is forked inside a call or a deferred job, by a plugin or a signal handler,
        keeps all of them: it cannot know which are its own.
        """
        if in_child and not _is_inside(sys._getframe(1)):
            for tracker in list(self.trackers.values()):
                tracker.forget_calls()
            if self.native is not None:
                self.native.forget_calls()

    def engine(self, llama: Llama) -> LlamaEngine:
        """Return the engine of ``llama``; create it if there is none or the context changed."""
        with self._lock:
            engine = self._engines.get(llama)
            if engine is None or engine.ctx != int(llama.ctx):
                n_seq_max = self.real_n_seq_max(llama.ctx)
                tracker = self.trackers.get(int(llama.ctx)) or self._adopt(llama, n_seq_max)
                load = self.loads.get(int(llama.model))
                engine = LlamaEngine(llama, self.hooks, self.background, n_seq_max, tracker, load)
                self._engines[llama] = engine
            return engine

    def end_paused(self) -> None:
        """End the requests whose generators wait for the app, on the background thread."""
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.end_paused()

    def give_up_parked(self) -> None:
        """Free plugins' sequences on the background thread: soon nothing hides them any more.

        While a call or a request uses a context, no other thread may change its cells. Then the end
        of the call or of the request frees them.
        """
        for tracker in {id(one): one for one in list(self.trackers.values())}.values():
            if tracker.parked:
                tracker.must_free_parked = True
                self.background.defer(tracker.handles, tracker.free_at_end)

    def free_at_end(self, tracker: CellTracker) -> None:
        """Free plugins' sequences after a call if the plugins ended during it."""
        if tracker.must_free_parked and not self.collecting.here():
            self.background.settle(tracker.handles[0])
            tracker.free_at_end()

    @contextmanager
    def call(self, tracker: CellTracker) -> Iterator[None]:
        """Keep other threads from freeing plugins' sequences inside a call on a context.

        Enter it before waiting for deferred work, which leaves the cells of a call alone.
        """
        try:
            with tracker.in_call():
                yield
        finally:
            self.free_at_end(tracker)

    def decode_together(self, ctx: int, batch: Any) -> int:
        """Evaluate a batch of several requests' tokens exactly; return llama.cpp's status."""
        if self.native is None:
            return self.real_decode(ctx, batch)
        with self.native.batch_of(ctx, int(batch.n_tokens)):
            status = self.real_decode(ctx, batch)
        if status < 0:
            self.native.failed(ctx)
        return status

    def level(self, ctx: int) -> int:
        """Return the index of a context's level; 0 for a context that has none."""
        return 0 if self.native is None else self.native.level(ctx)

    def leave_seats(self, ctx: int) -> None:
        """Make sequence 0 free for a request that begins."""
        tracker = self.trackers.get(ctx)
        if tracker is None or tracker.seats is None:
            return
        tracker.seats.give_up()
        for end in tuple(tracker.aside):
            if end.is_lost:
                end.give_up()

    def disown(self, context_id: str) -> None:
        """Let requests that are still open in a persistent context save nothing at their end.

        Take no lock, because the collector may have interrupted this thread anywhere.
        """
        for tracker in list(self.trackers.values()):
            for end in (*tracker.due, *tracker.aside):
                end.disown(context_id)

    def n_said(self, llama: Llama) -> int:
        """Return the number of tokens in a context, without a draft model's mere proposals."""
        with self._lock:
            engine = self._engines.get(llama)
        n_tokens = int(llama.n_tokens)
        return n_tokens if engine is None else min(n_tokens, engine.n_said)

    def seat(self, end: Seated) -> Seat | None:
        """Return a seat for a request; None if its context has none."""
        tracker = self.trackers.get(end.engine.ctx)
        return None if tracker is None or tracker.seats is None else Seat(self, end, tracker)

    def why_no_seats(self) -> str | None:
        """Return why no request can lie aside in a new context, judging by the plugins, or None.

        Plugins that set an engine up for a request, or edit its logits, must be able to switch.
        """
        names = [
            name
            for name in self.hooks.names()
            if _FOR_ONE_REQUEST.intersection(implemented := self.hooks.implemented(name))
            and "llmaas_request_switch" not in implemented
        ]
        return f"{', '.join(names)} can serve one call at a time only" if names else None

    def watch(
        self, ctx: int, app_n_seq_max: int, n_spare: int = 0, n_seats: int = 0
    ) -> CellTracker:
        """Start a context's tracker, stored under the addresses of the context and its memory.

        Args:
            ctx: Address of the context.
            app_n_seq_max: Number of sequences that the app asked for.
            n_spare: Number of cells that plugins added.
            n_seats: Number of requests that may lie aside.
        """
        memory = llama_cpp.llama_get_memory(ctx)
        handles = (ctx,) if memory is None else (ctx, int(memory))
        n_ctx = self.real_n_ctx(ctx) - n_spare
        settle = functools.partial(self.background.settle, ctx)
        tracker = CellTracker(handles, max(1, app_n_seq_max), n_ctx, settle)
        tracker.hides = self.real_n_seq_max(ctx) > tracker.app_n_seq_max
        tracker.n_spare = n_spare
        if n_seats:
            n_seq_max = self.real_n_seq_max(ctx)
            tracker.seats = Seats(range(n_seq_max - n_seats, n_seq_max))
            tracker.n_seat_cells = n_seats * tracker.app_n_ctx
        self.trackers.update(dict.fromkeys(tracker.handles, tracker))
        return tracker

    def _adopt(self, llama: Llama, n_seq_max: int) -> CellTracker:
        """Track a context that is older than the activation; trust ``Llama``'s records."""
        tracker = self.watch(int(llama.ctx), n_seq_max)
        tracker.n_explained = llama.n_tokens
        return tracker

    def app_batch(self, ctx: Any) -> None:
        """Announce the app's own use of a context, unless the context serves a request."""
        tracker = self.trackers.get(address(ctx))
        if tracker is not None and not (tracker.due or tracker.aside or tracker.is_lent):
            self.hooks.app_batch(tracker.handles[0], request_scope.current())

    def free_context(self, ctx: int, free: Callable[[], None]) -> None:
        """Free a context by calling ``free``, now or later on the background thread."""
        tracker = self.trackers.get(ctx)
        handles = (ctx,) if tracker is None else tracker.handles

        def tell() -> None:
            try:
                # after the end, no plugin may be called inside the garbage collector
                if not (self.background.is_closed and self.collecting.here()):
                    _tell(tracker, functools.partial(self.hooks.context_free, ctx))
            finally:
                if self.native is not None:
                    self.native.forget_context(ctx)
                self.with_more_outputs.discard(ctx)
                for handle in handles:
                    self.trackers.pop(handle, None)

        self.lifetimes.free_context(ctx, handles, tell, free)

    def free_model(self, model: int, free: Callable[[], None]) -> None:
        """Free a model by calling ``free``, once it has no contexts."""

        def go() -> None:
            try:
                self.loads.pop(model, None)  # another model may get this address
                if self.native is not None:
                    self.native.forget_model(model)
            finally:
                free()

        self.lifetimes.free_model(model, go)


def _tell(tracker: CellTracker | None, freed: Callable[[], None]) -> None:
    """End a context's requests, then tell the plugins that it is about to be freed."""
    try:
        if tracker is not None:
            tracker.close()
    finally:
        freed()


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers is in this package."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_OURS):
            return True
        frame = frame.f_back
    return False
