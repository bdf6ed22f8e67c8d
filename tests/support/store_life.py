"""The life of a small store, for tests that inject faults into it."""

from __future__ import annotations

import ctypes

import numpy as np
from stored_chunks import encoder, payload

from llmaas_plugins._native import Budget, Codec, KVGeometry, chunk_bound
from llmaas_plugins.kv_chunks.maintenance.cleanup import StoreCleanup
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
BOUND = chunk_bound(GEOM, Codec.RAW, 16)
# two pages at 8 bits, one page from 6 bits down
PLANES = KVGeometry(4, False, 1, 1, (64,) * 4, (64,) * 4)
RAM, DISK = 9 * PAGE, 13 * PAGE


def text(*parts):
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in parts])


A, B, C = text((0, 70)), text((0, 32), (500, 30)), text((1000, 90))
D, E, F = text((2000, 16 * 8)), text((3000, 48)), text((4000, 30))
K = text((7000, 32))
G, H = text((5000, 48)), text((5000, 16), (6000, 32))  # in bit planes


def open_store(directory):
    return ChunkStore(Budget(RAM), DiskStore(directory, DISK))


def save(store, tokens, name):
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        if not store.put(ids[i], BOUND, encoder(GEOM, ids[i]), is_first=i == 0):
            break
    store.touch(ids)
    store.set_head(name, ids)


def planes_bound(n_tokens, bits=8):
    return chunk_bound(PLANES, Codec.PLANES, n_tokens, bits)


def save_planes(store, tokens, name):
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        encode = encoder(PLANES, ids[i], 8)
        if not store.put(ids[i], planes_bound(16), encode, is_first=i == 0):
            break
    store.touch(ids)
    store.set_head(name, ids)


def cut(store, tokens, bits):
    """Demote the stored chunks of a bit-plane context."""
    ids = chain(ROOT, tokens)
    store.add_attention(ids, [1.0] * len(ids), [100.0] * len(ids))
    store.reduce_bits(ids, [bits] * len(ids), planes_bound)


def expected(chunk):
    """Return a chunk's expected bytes: all of them, or its remaining bit planes."""
    if chunk.bits == 0:
        return payload(GEOM, chunk.id)
    return payload(PLANES, chunk.id, 8)[: planes_bound(chunk.n_tokens, chunk.bits)]


def load(store, chunks):
    """Load chunks one by one, assert that each equals what was put, and return their keys."""
    return {key for chunk in chunks for key in load_together(store, [chunk])}


def load_together(store, chunks):
    """Load the leading chunks together and return their keys."""
    found = chunks[: len(addresses := store.reader.fetch(chunks))]
    for chunk, address in zip(found, addresses, strict=True):
        if ctypes.string_at(address, chunk.size) != expected(chunk):
            raise AssertionError(f"wrong payload for {chunk.id}")
    store.reader.unpin(found)
    return {chunk.id.key for chunk in found}


def load_ends(store):
    """Load the first and the last chunk on disk, which lie too far apart for one read."""
    places = sorted((chunk for chunk in store.tree if chunk.disk >= 0), key=lambda c: c.disk)
    load_together(store, [places[0], places[-1]] if len(places) > 1 else places)


def state(store):
    """Return the disk contents that the store knows of."""
    with store._residency.lock:
        keys = [chunk.id.key.hex() for chunk in store.tree if chunk.disk >= 0]
        heads = {name: key.hex() for name, key in store.tree.contexts().items()}
        stats = store._residency.counters
        return {"keys": keys, "heads": heads, "counted": stats.io_errors + stats.faults}


def life(directory):
    """Open, put, cut, flush, evict, forget, reopen, load and tidy; yield the disk contents each
    time.
    """
    store = open_store(directory)
    store.set_layout(ROOT, '{"n_layer": 1}')
    yield state(store)
    for tokens, name in ((A, "a"), (B, "b"), (C, "c")):
        save(store, tokens, name)
        store.flush()
        yield state(store)
    load(store, store.match(ROOT, A).path)
    store.evict_context("b")
    yield state(store)
    store.close()
    store = open_store(directory)
    counted = state(store)["counted"]
    load_ends(store)
    load(store, store.match(ROOT, C).path)
    store.touch(chain(ROOT, A))
    save(store, D, "d")
    store.flush()
    yield state(store)
    save_planes(store, G, "g")
    store.flush()
    cut(store, G, 5)
    save_planes(store, H, "h")
    cut(store, G, 3)
    save(store, K, "k")  # where cut chunks ended
    store.flush()
    yield state(store)
    store.evict_context("a")
    save(store, F, "f")
    store.flush()
    last = state(store)
    store.close()
    yield last | {"counted": last["counted"] + counted}
    cleanup = StoreCleanup(directory)
    try:
        cleanup.forget("f")
        cleanup.drop_damaged()
        cleanup.finish(shrink=True)
    finally:
        cleanup.close()
    gone = {wanted.key.hex() for wanted in chain(ROOT, F)}
    kept = [key for key in last["keys"] if key not in gone]
    yield last | {"keys": kept, "counted": last["counted"] + counted}
