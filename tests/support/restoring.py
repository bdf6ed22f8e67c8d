"""A context's stored chunks, moved between tiers and restored through the plugin's hook."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
from background import chunks_at_rest

from llmaas_hooks import Request


def engine_of(suite, llama):
    """Return the engine as plugins see it."""
    return suite._installed._host.engine(llama)


def plugin_of(suite):
    """Return the plugin."""
    return suite.plugin("kv_chunks")


def store_of(suite):
    """Return the plugin's store."""
    return plugin_of(suite)._store


def transfer_of(suite, llama):
    """Return the object that transfers this engine's chunks."""
    return plugin_of(suite)._transfer(engine_of(suite, llama))


def path_of(suite, llama, prompt):
    """Wait until no work is pending and return the stored chunks of a prompt."""
    root = transfer_of(suite, llama)._root(None)
    return chunks_at_rest(suite).match(root, np.array(prompt, np.int32)).path


def lose(suite, llama, prompt, indices):
    """Turn some of the prompt's chunks into ghosts."""
    path = path_of(suite, llama, prompt)
    for i in indices:
        store_of(suite).reader.drop_damaged(path[i])


def leave_ram(suite, llama, prompt, indices=None):
    """Evict some or all of the prompt's chunks from RAM, leaving them on disk only."""
    path, residency = path_of(suite, llama, prompt), store_of(suite)._residency
    with residency.lock:
        for i, chunk in enumerate(path):
            if chunk.ram >= 0 and (indices is None or i in indices):
                residency.evict_from_ram(chunk)


def restore(suite, llama, prompt):
    """Restore a prompt and return the hook's result and the cells' bytes."""
    engine = engine_of(suite, llama)
    engine.settle()
    with engine.lent():
        restored = suite.hooks.kv_restore(Request(engine, np.array(prompt, np.int32), None))
    if restored is not None:
        engine.set_restored(np.array(prompt[: restored.n_tokens], np.int32), engine.resident_app)
    return restored, cells(llama)


def cells(llama):
    """Return sequence 0 as llama.cpp exports it."""
    n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = np.zeros(n_bytes, np.uint8)
    pointer = ctypes.cast(blob.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, pointer, n_bytes, 0) == n_bytes
    return blob


def position_after(llama, sequence=0):
    """Return the position after the last one of a sequence."""
    memory = llama_cpp.llama_get_memory(llama.ctx)
    return llama_cpp.llama_memory_seq_pos_max(memory, sequence) + 1
