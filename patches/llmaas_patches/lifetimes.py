"""Order in which contexts and models are freed.

The same rules apply to every free, whoever requests it:

1. If the caller may wait (``Collecting.may_wait``), it waits for deferred work on the context,
   tells the plugins, and frees. As in vanilla, the memory is free when ``close`` returns.
2. Otherwise the free is queued after the context's deferred work, for the background thread. The
   caller neither waits nor calls a plugin. This applies inside the garbage collector, a finalizer,
   a plugin, a signal handler that interrupted the suite, and the background thread.
3. A model is freed after all its contexts, including plugins' own. If an app frees a model earlier,
   the model is freed together with its last context.

Loading a model waits for queued frees, so that two models are not in memory at the same time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from llama_cpp import llama_cpp

from llmaas_patches.background import BackgroundWork
from llmaas_patches.collecting import Collecting

__all__ = ["Lifetimes"]


class _Life:
    """The life of a context, from its creation until it is freed."""

    def __init__(self, model: int) -> None:
        self.model = model


class Lifetimes:
    """Live contexts, and models that wait to be freed with their last context.

    The collector may interrupt this code and call it again on the same thread. Each change of
    shared state is therefore a single operation of the interpreter, and no lock is needed.
    """

    def __init__(self, background: BackgroundWork, collecting: Collecting) -> None:
        """Start without contexts."""
        self._background = background
        self._collecting = collecting
        self._by_ctx: dict[int, _Life] = {}
        self._living: set[_Life] = set()
        self._doomed: dict[int, Iterator[None]] = {}

    def context_made(self, ctx: int, model: int) -> None:
        """Register a new context, whose model must not be freed before it."""
        life = self._by_ctx[ctx] = _Life(model)
        self._living.add(life)

    def contexts_of(self, model: int) -> list[int]:
        """Return the contexts of a model that were made since the activation and are not freed."""
        return [ctx for ctx, life in list(self._by_ctx.items()) if life.model == model]

    def free_context(
        self,
        ctx: int,
        handles: tuple[int, ...],
        tell: Callable[[], None],
        free: Callable[[], None],
    ) -> None:
        """Free a context, now or after its deferred work.

        Args:
            ctx: Address of the context.
            handles: Addresses of the context and of its memory.
            tell: Function that tells the plugins and removes all records of the context, because
                another context may get its address.
            free: Function that frees the context.
        """
        life = self._by_ctx.get(ctx)
        if life is None:  # created before the activation
            life = _Life(int(llama_cpp.llama_get_model(ctx)))
            self._living.add(life)
        tells, frees = _once(tell), _once(free)

        def go() -> None:  # the next call goes on where Ctrl-C cut off this one
            try:
                next(tells, None)
            finally:
                if self._by_ctx.get(ctx) is life:  # another context may get this address
                    self._by_ctx.pop(ctx, None)
                try:
                    next(frees, None)
                finally:
                    self._living.discard(life)
                    self._release(life.model)

        try:
            if self._collecting.may_wait():
                self._background.settle(ctx)
                go()
                return
        except BaseException:  # Ctrl-C, maybe before the free
            self._background.defer(handles, go, is_free=True)
            raise
        self._background.defer(handles, go, is_free=True)

    def free_model(self, model: int, free: Callable[[], None]) -> None:
        """Free a model, now or with its last context."""
        try:
            self._doomed[model] = _once(free)
            self.settle()
        finally:
            self._release(model)

    def settle(self) -> None:
        """Wait for queued frees, if this thread may wait."""
        if self._background.pending and self._collecting.may_wait():
            self._background.settle_frees()
        for model in tuple(self._doomed):  # if Ctrl-C came before their release
            self._release(model)

    def _release(self, model: int) -> None:
        if any(life.model == model for life in tuple(self._living)):
            return
        frees = self._doomed.get(model)
        if frees is not None:
            try:
                self._doomed.pop(model, None)  # first: another model may get this address
            finally:
                next(frees, None)


def _once(work: Callable[[], None]) -> Iterator[None]:
    """Return an iterator whose first ``next`` calls ``work``.

    The iterator is C code. Ctrl-C comes before or after it, so the call is neither lost nor made
    twice.
    """
    return map(operator.call, [work])
