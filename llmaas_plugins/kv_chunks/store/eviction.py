"""Eviction order of chunks (LLMS §3.4): LCTRU or plain LRU.

LCTRU first evicts the least compression-tolerable chunks, which have the most bits. They take the
most space, while recomputing a chunk costs the same whatever its bits. Among chunks of equal bits
the least recently used one goes first. LCTRU helps if evicted chunks are recomputed. If they are
read back from disk instead, LCTRU may evict chunks of contexts that are needed soon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from llmaas_plugins.kv_chunks.store.tree import Chunk

__all__ = ["EvictionPolicy", "EvictionQueue"]

EvictionPolicy = Literal["lctru", "lru"]


class EvictionQueue:
    """The chunks of one tier in eviction order.

    A context's chunks are touched from the last to the first. A chunk's last use is therefore older
    than that of the chunks before it, and eviction shortens contexts from their end.
    """

    def __init__(self, eviction: EvictionPolicy) -> None:
        """Start empty."""
        self._by_bits = eviction == "lctru"
        self._levels: dict[int, OrderedDict[Chunk, None]] = {}

    def __len__(self) -> int:
        """Return the number of chunks."""
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks in eviction order."""
        for bits in sorted(self._levels, reverse=True):
            yield from self._levels[bits]

    def add(self, chunk: Chunk, *, is_oldest: bool = False) -> None:
        """Add a chunk as its level's most recently used one, or as its least if ``is_oldest``."""
        level = self._levels.setdefault(self._level(chunk), OrderedDict())
        level[chunk] = None
        if is_oldest:
            level.move_to_end(chunk, last=False)

    def touch(self, chunk: Chunk) -> None:
        """Mark a chunk as just used, if it is in the queue."""
        level = self._levels.get(self._level(chunk))
        if level is not None and chunk in level:
            level.move_to_end(chunk)

    def remove(self, chunk: Chunk) -> bool:
        """Remove a chunk, also before its bits change; return whether it was in the queue."""
        level = self._levels.get(self._level(chunk))
        if level is None or chunk not in level:
            return False
        del level[chunk]
        return True

    def _level(self, chunk: Chunk) -> int:
        return chunk.bits if self._by_bits else 0
