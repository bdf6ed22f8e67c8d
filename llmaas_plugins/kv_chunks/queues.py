"""In which order chunks give way (LLMS §3.4): LCTRU, or LRU alone.

Under LCTRU the least compression-tolerable chunks, those with the most bits, go first: the same
room takes fewer of them, and what is recomputed instead of read costs the same whatever its bits
were. Among chunks of equal bits the least recently used one goes first. It pays where recomputing
does; where chunks are read back, it takes from contexts that are about to be called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["Eviction", "Queue"]

Eviction = Literal["lctru", "lru"]


class Queue:
    """The chunks of one tier, the next to go first.

    A context's chunks are touched last chunk first, so a chunk is older than the ones before it,
    and eviction shortens contexts from their end.
    """

    def __init__(self, eviction: Eviction) -> None:
        """Start empty."""
        self._by_bits = eviction == "lctru"
        self._levels: dict[int, OrderedDict[Chunk, None]] = {}

    def __len__(self) -> int:
        """Number of chunks."""
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks, the next to go first."""
        for bits in sorted(self._levels, reverse=True):
            yield from self._levels[bits]

    def enter(self, chunk: Chunk, *, is_oldest: bool = False) -> None:
        """The chunk is here now; it is its level's most recently used one, or the least."""
        level = self._levels.setdefault(self._level(chunk), OrderedDict())
        level[chunk] = None
        if is_oldest:
            level.move_to_end(chunk, last=False)

    def touch(self, chunk: Chunk) -> None:
        """The chunk was used, if it is here."""
        level = self._levels.get(self._level(chunk))
        if level is not None and chunk in level:
            level.move_to_end(chunk)

    def leave(self, chunk: Chunk) -> bool:
        """The chunk goes, or is about to get other bits; whether it was here."""
        level = self._levels.get(self._level(chunk))
        if level is None or chunk not in level:
            return False
        del level[chunk]
        return True

    def _level(self, chunk: Chunk) -> int:
        return chunk.bits if self._by_bits else 0
