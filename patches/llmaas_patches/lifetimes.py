"""When contexts and models go.

One rule decides every free, whoever asks for it, and wherever:

1. Where the caller may wait (``Collecting.may_wait``), it waits for deferred work on the context,
   tells the plugins, and frees, as vanilla does. Memory is back when ``close`` returns.
2. Anywhere else (inside the garbage collector, a finalizer, a plugin, a signal handler on top of
   our code, on the lane's own thread) the free is put in line behind the context's deferred work.
   It never waits, and calls no plugin there: the lane's thread does all of it.
3. A model goes after its contexts, plugins' own contexts among them: if it is freed before them,
   the last one's free takes it along.

Loading a model waits for frees that are in line, so that two models are not in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from llama_cpp import llama_cpp

from llmaas_patches.collecting import Collecting
from llmaas_patches.lanes import Lanes

__all__ = ["Lifetimes"]


class _Life:
    """The life of a context, from its creation until it is freed."""

    def __init__(self, model: int) -> None:
        self.model = model


class Lifetimes:
    """Contexts that are alive, and models that go with the last of theirs.

    The collector may come back to this code in the middle of it, on the same thread: each change of
    shared state is one operation of the interpreter, and no lock is needed.
    """

    def __init__(self, lanes: Lanes, collecting: Collecting) -> None:
        """Know no context yet."""
        self._lanes = lanes
        self._collecting = collecting
        self._by_ctx: dict[int, _Life] = {}
        self._living: set[_Life] = set()
        self._doomed: dict[int, Callable[[], None]] = {}

    def context_made(self, ctx: int, model: int) -> None:
        """Note a new context: its model must not go before it."""
        life = self._by_ctx[ctx] = _Life(model)
        self._living.add(life)

    def free_context(
        self,
        ctx: int,
        handles: tuple[int, ...],
        tell: Callable[[], None],
        free: Callable[[], None],
    ) -> None:
        """Free a context, now or behind its deferred work.

        Args:
            ctx: Its address.
            handles: Its address and its memory's.
            tell: Tells the plugins, and forgets it. Nothing may find it by its address afterwards:
                another one may get that.
            free: Frees it.
        """
        life = self._by_ctx.pop(ctx, None)
        if life is None:  # older than the activation
            life = _Life(int(llama_cpp.llama_get_model(ctx)))
            self._living.add(life)

        def go() -> None:
            try:
                tell()
            finally:
                try:
                    free()
                finally:
                    self._living.discard(life)
                    self._release(life.model)

        if self._collecting.may_wait():
            try:
                self._lanes.settle(ctx)
            except BaseException:  # Ctrl-C while it waits
                self._lanes.defer(handles, go, is_free=True)
                raise
            go()
        else:
            self._lanes.defer(handles, go, is_free=True)

    def free_model(self, model: int, free: Callable[[], None]) -> None:
        """Free a model, now or with its last context."""
        self._doomed[model] = free
        try:
            self.settle()
        finally:
            self._release(model)

    def settle(self) -> None:
        """Wait for the frees in line, where waiting is possible."""
        if self._lanes.pending and self._collecting.may_wait():
            self._lanes.settle_frees()

    def _release(self, model: int) -> None:
        if any(life.model == model for life in tuple(self._living)):
            return
        free = self._doomed.pop(model, None)
        if free is not None:
            free()
