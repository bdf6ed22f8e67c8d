"""Stores whose chunks take one page each."""

from __future__ import annotations

import ctypes

import numpy as np
from stored_chunks import encoder, payload

from llmaas_plugins._native import (
    Codec,
    KVGeometry,
    chunk_bound,
)
from llmaas_plugins.kv_chunks.store.chunk_ids import chain

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
BOUND = chunk_bound(GEOM, Codec.RAW, 16)


def text(*parts):
    """Return token ids from (first, count) pairs."""
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in parts])


def put(store, wanted, bound=BOUND, level=0):
    return store.put(wanted, bound, encoder(GEOM, wanted, level), is_first=wanted.parent == ROOT)


def save(store, tokens, name=None, bits=()):
    """Save cells of ``tokens`` as ``Transfer.save`` does, the first chunks with these ``bits``."""
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        if not put(store, ids[i], level=bits[i] if i < len(bits) else 0):
            break
    store.touch(ids)
    if name is not None:
        store.set_head(name, ids)
    return ids


def load(store, tokens):
    """Return the token count of loaded leading chunks; assert that none changed."""
    path, _ = store.match(ROOT, tokens)
    addresses = store.reader.fetch(path)
    ready = path[: len(addresses)]
    for chunk, address in zip(ready, addresses, strict=True):
        assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)
    store.reader.unpin(ready)
    assert all(chunk.pins == 0 for chunk in store.tree)
    return sum(chunk.n_tokens for chunk in ready)
