"""What the wrappers share: the hook manager, the lanes, and the engines seen so far."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from llama_cpp import Llama, LlamaState, llama_cpp

from llmaas_hooks import HookManager, ModelLoad, forks
from llmaas_patches.collecting import Collecting
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.lanes import Lanes
from llmaas_patches.ledger import Known, Ledger
from llmaas_patches.lifetimes import Lifetimes
from llmaas_patches.native import native_host
from llmaas_patches.scope import serving_context
from llmaas_patches.silence import Silence

__all__ = ["Host", "serving_context"]


class Host:
    """State of one activation on the patching side.

    Attributes:
        hooks: The plugins.
        lanes: Deferred work.
        collecting: Which threads are inside the garbage collector.
        lifetimes: When contexts and models go.
        silence: What is logged while a model is loaded.
        loads: How each model was opened, by its address; those opened since the activation.
        ledgers: By the addresses of a context and its memory.
        states: What is known of the states that ``Llama.save_state`` made.
        with_more_outputs: Contexts whose last batch gave logits that only plugins asked for.
        native: The engine-side hook point; None when no plugin needs it.
        real_n_ctx, real_n_seq_max: The bindings that the app's ones stand for.
    """

    def __init__(self, hooks: HookManager) -> None:
        """Attach to the plugins of one activation.

        Raises:
            IncompatibleError: A plugin needs the engine-side hook point, which cannot be had, and
                errors are to be raised.
        """
        self.hooks = hooks
        self.native = native_host(hooks)
        self.collecting = Collecting()
        self.lanes = Lanes(self.collecting)
        self.lifetimes = Lifetimes(self.lanes, self.collecting)
        self.silence = Silence()
        self.loads: dict[int, ModelLoad] = {}
        self.ledgers: dict[int, Ledger] = {}
        self.states: weakref.WeakKeyDictionary[LlamaState, Known] = weakref.WeakKeyDictionary()
        self.with_more_outputs: set[int] = set()
        self.real_n_ctx: Callable[[Any], int] = llama_cpp.llama_n_ctx
        self.real_n_seq_max: Callable[[Any], int] = llama_cpp.llama_n_seq_max
        self._engines: weakref.WeakKeyDictionary[Llama, LlamaEngine] = weakref.WeakKeyDictionary()
        self._lock = forks.lock()

    def engine(self, llama: Llama) -> LlamaEngine:
        """The engine of ``llama``; made at its first request, and anew if its context changed."""
        with self._lock:
            engine = self._engines.get(llama)
            if engine is None or engine.ctx != int(llama.ctx):
                n_seq_max = self.real_n_seq_max(llama.ctx)
                ledger = self.ledgers.get(int(llama.ctx)) or self._adopt(llama, n_seq_max)
                load = self.loads.get(int(llama.model))
                engine = LlamaEngine(llama, self.hooks, self.lanes, n_seq_max, ledger, load)
                self._engines[llama] = engine
            return engine

    def n_said(self, llama: Llama) -> int:
        """Return the tokens in a context, less those that a draft model only proposed."""
        with self._lock:
            engine = self._engines.get(llama)
        n_tokens = int(llama.n_tokens)
        return n_tokens if engine is None else min(n_tokens, engine.n_said)

    def watch(self, ctx: int, app_n_seq_max: int, n_spare: int = 0) -> Ledger:
        """Start a context's ledger; it is found under the context's and its memory's address.

        Args:
            ctx: Its address.
            app_n_seq_max: Sequences the app asked for.
            n_spare: Cells that plugins added.
        """
        memory = llama_cpp.llama_get_memory(ctx)
        handles = (ctx,) if memory is None else (ctx, int(memory))
        ledger = Ledger(handles, max(1, app_n_seq_max), self.real_n_ctx(ctx) - n_spare)
        ledger.hides = self.real_n_seq_max(ctx) > ledger.app_n_seq_max
        ledger.n_spare = n_spare
        self.ledgers.update(dict.fromkeys(ledger.handles, ledger))
        return ledger

    def _adopt(self, llama: Llama, n_seq_max: int) -> Ledger:
        """Start the ledger of a context that is older than the activation: its books are right."""
        ledger = self.watch(int(llama.ctx), n_seq_max)
        ledger.n_explained = llama.n_tokens
        return ledger

    def free_context(self, ctx: int, free: Callable[[], None]) -> None:
        """Free a context by calling ``free``, when and where that is possible."""
        ledger = self.ledgers.get(ctx)
        handles = (ctx,) if ledger is None else ledger.handles

        def tell() -> None:
            try:
                if not (self.lanes.is_closed and self.collecting.here()):  # the suite ends just now
                    _tell(ledger, functools.partial(self.hooks.context_free, ctx))
            finally:
                if self.native is not None:
                    self.native.forget_context(ctx)
                self.with_more_outputs.discard(ctx)
                for handle in handles:
                    self.ledgers.pop(handle, None)

        self.lifetimes.free_context(ctx, handles, tell, free)

    def free_model(self, model: int, free: Callable[[], None]) -> None:
        """Free a model by calling ``free``, once no context of it is left."""

        def go() -> None:
            self.loads.pop(model, None)  # another model may get its address
            if self.native is not None:
                self.native.forget_model(model)
            free()

        self.lifetimes.free_model(model, go)


def _tell(ledger: Ledger | None, freed: Callable[[], None]) -> None:
    """Tell the plugins that a context goes, after the ends of its requests."""
    try:
        if ledger is not None:
            ledger.close()
    finally:
        freed()
