"""Content-based names of chunks: a hash chain over tokens, so that a shared prefix has one name.

A chunk's key is the hash of its parent's key and its own tokens. The first chunk's parent is the
root, a hash of everything that determines the bytes in the cells (``model_identity``). Equal keys
therefore mean equal cells, and a context's chunks are found without a table of contexts.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from llmaas_hooks import Tokens

__all__ = ["CHUNK_TOKENS", "KEY_BYTES", "TOKEN_BYTES", "ChunkId", "chain", "chunk_key"]

CHUNK_TOKENS = 16
"""Tokens in a full chunk (LLMS §3.1)."""
TOKEN_BYTES = 4
KEY_BYTES = 32


class ChunkId(NamedTuple):
    """Identity of a chunk.

    Attributes:
        key: 32-byte hash of the chunk and everything before it.
        parent: Key of the previous chunk, or the root.
        tokens: Token ids as little-endian int32; only a context's last chunk has fewer than 16.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def chain(root: bytes, tokens: Tokens) -> list[ChunkId]:
    """Split tokens into chunks and return the chunks' identities in order.

    Args:
        root: 32-byte root of the chain.
        tokens: Token ids from position 0 on, shape ``(n,)``.
    """
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = CHUNK_TOKENS * TOKEN_BYTES
    ids = []
    parent = root
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        key = chunk_key(parent, piece)
        ids.append(ChunkId(key, parent, piece))
        parent = key
    return ids


def chunk_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of the chunk that follows ``parent`` and has these token bytes."""
    return hashlib.blake2b(parent + tokens, digest_size=32).digest()
