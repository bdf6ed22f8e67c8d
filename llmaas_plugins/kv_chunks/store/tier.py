"""Space for encoded chunks with a size limit and an eviction queue: the base of both tiers."""

from __future__ import annotations

from collections.abc import Callable

from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy, EvictionQueue
from llmaas_plugins.kv_chunks.store.extents import ExtentAllocator
from llmaas_plugins.kv_chunks.store.tree import Chunk

__all__ = ["Tier"]


class Tier:
    """Space for chunks, with an eviction queue.

    Attributes:
        queue: Chunks of this tier in eviction order.
    """

    def __init__(self, capacity: int, eviction: EvictionPolicy) -> None:
        """Start empty, with space for at most ``capacity`` bytes."""
        self._extents = ExtentAllocator(capacity)
        self.queue = EvictionQueue(eviction)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, in whole pages."""
        return self._extents.used

    @property
    def capacity(self) -> int:
        """Total bytes, in whole pages."""
        return self._extents.capacity

    @property
    def usable_bytes(self) -> int:
        """Bytes of the capacity that chunks may use."""
        return self._extents.capacity

    def reserve(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> int | None:
        """Reserve ``n_bytes``, after evicting as few chunks as needed.

        Args:
            n_bytes: Bytes to reserve.
            evictable: Function that returns whether a chunk may be evicted.
            evict: Function that evicts a chunk; it must call ``free``.

        Returns:
            Offset of the space, or None if evicting all such chunks is not enough. Nothing is
            evicted if ``n_bytes`` exceeds ``usable_bytes``.
        """
        if n_bytes > self.usable_bytes:
            return None
        offset = self._allocate(n_bytes)
        while offset is None and self._evict_one(evictable, evict):
            offset = self._allocate(n_bytes)
        return offset

    def _evict_one(
        self, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> bool:
        """Evict the next chunk that may go; return whether there was one."""
        victim = next(filter(evictable, self.queue), None)
        if victim is not None:
            evict(victim)
        return victim is not None

    def _allocate(self, n_bytes: int) -> int | None:
        return self._extents.allocate(n_bytes)

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Free the unused end of a reservation."""
        self._extents.shrink(offset, old_bytes, new_bytes)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Free a reservation that no chunk used."""
        self._extents.release(offset, n_bytes)

    def claim(self, offset: int, n_bytes: int) -> bool:
        """Reserve exactly this place, for a chunk found at start; return False if it is taken."""
        return self._extents.claim(offset, n_bytes)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Free the chunk's space at ``offset``, and take the chunk out of the queue."""
        self.queue.remove(chunk)
        self._extents.release(offset, chunk.size)
