"""Names of chunks: a hash chain over their tokens, so that a shared prefix has one name.

A chunk's key hashes its parent's key and its own tokens; the first chunk's parent is the root, a
hash of everything that decides the bytes in the cells (``fingerprint``). Equal keys therefore mean
equal cells, and a context's chunks are found without any table of contexts.
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
        key: 32 bytes, unique for the chunk and everything before it.
        parent: Key of the chunk before it, or the root.
        tokens: Its token ids, int32 little-endian; fewer than 16 only in a context's last chunk.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def chain(root: bytes, tokens: Tokens) -> list[ChunkId]:
    """Identities of the chunks of ``tokens``, shape ``(n,)``, in order.

    Args:
        root: 32-byte fingerprint hash.
        tokens: Token ids from position 0 on.
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
    """Key of the chunk with these token bytes behind ``parent``."""
    return hashlib.blake2b(parent + tokens, digest_size=32).digest()
