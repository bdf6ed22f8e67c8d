"""Private names of ``kv_chunks`` and of the activation that studies need, behind small functions.

Apps have no use for them, so the packages offer no public way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from llmaas_patches.engine import LlamaEngine
from llmaas_plugins import Suite
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore

__all__ = ["change_attention", "engine_of", "finish_writes", "leave_ram", "store_of"]

Taken = tuple[NDArray[Any], NDArray[Any]]
"""Sums of attention and numbers of scores, by chunk."""


def engine_of(suite: Suite, llama: Any) -> LlamaEngine:
    """Return the engine of a ``Llama``, which requests are made of."""
    return suite._installed._host.engine(llama)


def store_of(suite: Suite) -> ChunkStore:
    """Return the plugin's chunks in RAM and on disk."""
    store: ChunkStore = suite.plugin("kv_chunks")._store
    return store


def finish_writes(suite: Suite) -> None:
    """Wait until all saved chunks are encoded and on disk, and read back."""
    suite.settle()
    # queued last, so it runs after all writes and read-backs
    suite.plugin("kv_chunks")._workers.write.submit(int).result()


def leave_ram(suite: Suite) -> None:
    """Evict all chunks from the RAM tier; all of them are on disk."""
    residency = store_of(suite)._residency
    with residency.lock:
        for chunk in store_of(suite).tree:
            if chunk.ram >= 0:
                residency.evict_from_ram(chunk)


def change_attention(
    suite: Suite, engine: LlamaEngine, change: Callable[[Callable[[int], Taken], int], Taken]
) -> None:
    """Change the attention that the plugin sees on an engine, if it looks at attention.

    Args:
        suite: The activation.
        engine: The engine, which has a request behind it.
        change: Function of the plugin's own way to take attention and of a number of tokens; it
            returns what the plugin gets for so many tokens.
    """
    attention: Any = suite.plugin("kv_chunks")._transfer(engine)._attention
    if attention is not None:
        take = attention.take
        attention.take = lambda n_tokens: change(take, n_tokens)
