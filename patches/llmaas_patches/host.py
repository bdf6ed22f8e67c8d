"""What the wrappers share: the hook manager, the lanes, and the engines seen so far."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llama_cpp import Llama, llama_cpp

from llmaas_hooks import HookManager
from llmaas_patches.engine import LlamaEngine
from llmaas_patches.lanes import Lanes
from llmaas_patches.ownership import Ownership

__all__ = ["Host", "current_context", "serving_context"]

current_context: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "llmaas_current_context", default=None
)
"""Persistent context that the ``Llama.generate`` calls of this thread or task belong to."""


@contextmanager
def serving_context(context_id: str) -> Iterator[None]:
    """Name the persistent context for the requests started inside the block."""
    token = current_context.set(context_id)
    try:
        yield
    finally:
        current_context.reset(token)


class Host:
    """State of one activation on the patching side."""

    def __init__(self, hooks: HookManager) -> None:
        """Attach to the plugins of one activation."""
        self.hooks = hooks
        self.lanes = Lanes()
        self.ownership = Ownership()
        self.app_n_seq_max: dict[int, int] = {}
        self.real_n_seq_max: Callable[[Any], int] = llama_cpp.llama_n_seq_max
        self._engines: weakref.WeakKeyDictionary[Llama, LlamaEngine] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def engine(self, llama: Llama) -> LlamaEngine:
        """The engine of ``llama``; made at its first request, and anew if its context changed."""
        with self._lock:
            engine = self._engines.get(llama)
            if engine is None or engine.ctx != int(llama.ctx):
                n_seq_max = self.real_n_seq_max(llama.ctx)
                engine = LlamaEngine(llama, self.hooks, self.lanes, n_seq_max)
                self._engines[llama] = engine
                self.ownership.adopt(engine.handles, llama._batch.batch)
            return engine
