"""Valid chunks for any identity, to put into a store and to compare with loaded ones."""

from __future__ import annotations

import functools

import numpy as np

from llmaas_plugins._native import Codec, blob_init, blob_size, chunk_bound, chunk_encode


@functools.lru_cache(maxsize=4096)
def payload(geometry, wanted, bits=0):
    """Return a chunk whose cells derive from its key, in ``bits`` bit planes or raw."""
    rng = np.random.default_rng(int.from_bytes(wanted.key[:8], "little"))
    n_bytes, n_tokens = blob_size(geometry, 16), len(wanted.tokens) // 4
    blob = rng.integers(0, 256, n_bytes, np.uint8)
    if bits:
        blob = rng.standard_normal(n_bytes // 2).astype(np.float16).view(np.uint8)
    blob_init(geometry, blob, range(16))
    codec = Codec.PLANES if bits else Codec.RAW
    out = bytearray(chunk_bound(geometry, Codec.RAW, 16))
    return bytes(
        out[: chunk_encode(geometry, codec, blob, 16, 0, n_tokens, wanted.key, out, bits or 8)]
    )


def put(store, geometry, ids, name=None):
    """Put a whole context, which must find room."""
    bound = chunk_bound(geometry, Codec.RAW, 16)
    for i in store.missing(ids):
        encode = encoder(geometry, ids[i])
        assert store.put(ids[i], bound, encode, is_first=i == 0, context_id=name)
    store.touch(ids)
    if name is not None:
        store.set_head(name, ids)


def encoder(geometry, wanted, bits=0):
    """Return the callback that fills a chunk's reserved space in ``ChunkStore.put``."""

    def encode(out):
        data = payload(geometry, wanted, bits)
        out[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    return encode
