"""Sound chunks for any identity, to put into a store and to compare with what comes back."""

from __future__ import annotations

import functools

import numpy as np

from llmaas_plugins._native import Codec, blob_init, blob_size, chunk_bound, chunk_encode


@functools.lru_cache(maxsize=4096)
def payload(geometry, wanted):
    """A chunk whose cells follow from its key."""
    rng = np.random.default_rng(int.from_bytes(wanted.key[:8], "little"))
    blob = rng.integers(0, 256, blob_size(geometry, 16), np.uint8)
    blob_init(geometry, blob, range(16))
    out, n_tokens = bytearray(chunk_bound(geometry, Codec.RAW, 16)), len(wanted.tokens) // 4
    return bytes(out[: chunk_encode(geometry, Codec.RAW, blob, 16, 0, n_tokens, wanted.key, out)])


def put(store, geometry, ids, name=None):
    """A whole context, which must find room."""
    bound = chunk_bound(geometry, Codec.RAW, 16)
    for i in store.missing(ids):
        assert store.put(ids[i], bound, encoder(geometry, ids[i]), is_first=i == 0)
    store.touch(ids)
    if name is not None:
        store.set_head(name, ids)


def encoder(geometry, wanted):
    """What ``ChunkStore.put`` lets fill its room."""

    def encode(out):
        data = payload(geometry, wanted)
        out[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    return encode
