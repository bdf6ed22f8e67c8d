"""The two tiers for encoded chunks, RAM and disk, each with a size limit and an eviction queue."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import BudgetError, StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy, EvictionQueue
from llmaas_plugins.kv_chunks.store.extents import PAGE, ExtentAllocator, page_round
from llmaas_plugins.kv_chunks.store.huge_pages import discard_pages, map_huge_pages
from llmaas_plugins.kv_chunks.store.store_files import FILES
from llmaas_plugins.kv_chunks.store.tree import Chunk

__all__ = ["DiskTier", "RamTier", "Tier"]

_MAX_STALE_RANGES = 1 << 16
_COMPACT_DIVISOR = 32  # compact if at least 1/32 of the arena is free


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


class RamTier(Tier):
    """An anonymous mapping of fixed size, whose pages are committed when first written.

    Attributes:
        lent: Bytes of the capacity that other owners use as memory elsewhere; chunks leave as
            many bytes free.
    """

    def __init__(self, budget: Budget, eviction: EvictionPolicy) -> None:
        """Map and reserve all that is left of the budget.

        Raises:
            BudgetError: The system does not have that many addresses or bytes.
        """
        capacity = budget.limit - budget.used
        budget.reserve(capacity)
        super().__init__(capacity, eviction)
        self.lent = 0
        try:
            self._bytes = map_huge_pages(self.capacity)
        except OSError as error:
            raise BudgetError(
                f"cannot reserve {capacity >> 20} MiB of memory for chunks: {error.strerror}. "
                "Lower plugins.kv_chunks.ram_budget."
            ) from error
        self._is_resident = np.zeros(self.capacity // PAGE, dtype=np.bool_)  # by page
        self._resident_bytes = 0
        self._base = int(self._bytes.ctypes.data)

    @property
    def usable_bytes(self) -> int:
        """Bytes that chunks may use."""
        return self.capacity - self.lent

    def lend(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> bool:
        """Set the total number of lent bytes, after evicting as few chunks as needed.

        Returns:
            False if there is not enough space; as many bytes as possible are then lent.
        """
        is_met = True
        while is_met and self.used_bytes + n_bytes > self.capacity:
            is_met = self._evict_one(evictable, evict)
        self.lent = min(n_bytes, self.capacity - self.used_bytes)
        self._discard_free_pages()
        return is_met

    def _allocate(self, n_bytes: int) -> int | None:
        if self.used_bytes + page_round(n_bytes) > self.usable_bytes:
            return None
        offset = super()._allocate(n_bytes)
        if offset is not None:
            self._mark_resident(offset, n_bytes)
            self._discard_free_pages()
        return offset

    def _mark_resident(self, offset: int, n_bytes: int) -> None:
        """Record that these pages will be written and then hold memory."""
        pages = self._is_resident[offset // PAGE : (offset + page_round(n_bytes)) // PAGE]
        self._resident_bytes += PAGE * int(len(pages) - np.count_nonzero(pages))
        pages[:] = True

    def _discard_free_pages(self) -> None:
        """Release free pages if pages with memory and lent bytes exceed the capacity together."""
        if self._resident_bytes + self.lent <= self.capacity:
            return
        for offset, n_bytes in self._extents.free_within(0, self.capacity):
            pages = self._is_resident[offset // PAGE : (offset + n_bytes) // PAGE]
            if pages.any():
                discard_pages(self._bytes[offset : offset + n_bytes])
                pages[:] = False
        self._resident_bytes = PAGE * int(np.count_nonzero(self._is_resident))

    def address(self, offset: int) -> int:
        """Return the address of a byte of the arena."""
        return self._base + offset

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Return a view of a part of the arena."""
        return self._bytes[offset : offset + n_bytes]

    def compact(self) -> None:
        """Move chunks to close gaps if the gaps are large together; skip chunks in use."""
        free = self.usable_bytes - self.used_bytes
        if free < self.capacity // _COMPACT_DIVISOR or 2 * self._extents.longest() > free:
            return
        for chunk in sorted(self.queue, key=lambda chunk: chunk.ram):
            if chunk.pins == 0:
                self._extents.release(chunk.ram, chunk.size)
                place = self._extents.allocate(chunk.size)
                assert place is not None  # at least its old place is free
                if place != chunk.ram:
                    ctypes.memmove(
                        self.address(place), self.address(chunk.ram), page_round(chunk.size)
                    )
                    chunk.ram = place
                    self._mark_resident(place, chunk.size)
        self._discard_free_pages()


class DiskTier(Tier):
    """The slab file. Page 0 is the header; chunk extents follow.

    Free space may hold bytes of old chunks until it is overwritten or erased.
    """

    HEADER_BYTES = 4096

    def __init__(self, path: Path, budget: int) -> None:
        """Open the file, or create it with mode 0600; it will have at most ``budget`` bytes.

        Reads and writes bypass the page cache if the file system supports it.

        Raises:
            StoreError: The path is not a regular file, or it cannot be opened or made private.
        """
        super().__init__(max(0, budget - self.HEADER_BYTES), "lru")
        self._stale: dict[int, int] | None = None  # freed places and sizes; None: all free space
        self._file = FILES.open(path, os.O_RDWR | os.O_CREAT)
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:  # for example on tmpfs
            self._direct = os.dup(self._file)

    @property
    def fd(self) -> int:
        """File descriptor for native reads and writes of whole blocks."""
        return self._direct

    def file_offset(self, offset: int) -> int:
        """Return an extent's offset in the file."""
        return self.HEADER_BYTES + offset

    def file_size(self) -> int:
        """Return the current length of the file."""
        return os.fstat(self._file).st_size

    def read_header(self) -> bytes:
        """Return the header page, or fewer bytes if the file is new."""
        return os.pread(self._file, self.HEADER_BYTES, 0)

    def write_header(self, header: bytes) -> None:
        """Empty the slab and write ``header`` durably."""
        os.ftruncate(self._file, 0)
        page, n = header.ljust(self.HEADER_BYTES, b"\0"), 0
        while n < len(page):
            n += os.pwrite(self._file, page[n:], n)
        os.fsync(self._file)

    def truncate_to_capacity(self) -> None:
        """Truncate a file that was written under a larger budget."""
        if self.file_size() > self.file_offset(self.capacity):
            os.ftruncate(self._file, self.file_offset(self.capacity))

    def truncate_tail(self) -> None:
        """Truncate the file after the last used byte."""
        runs = self._extents.free_within(0, self.capacity)
        is_tail = bool(runs) and sum(runs[-1]) == self.capacity
        end = self.file_offset(runs[-1][0] if is_tail else self.capacity)
        if self.file_size() > end:
            os.ftruncate(self._file, end)

    # -- old bytes ------------------------------------------------------------------------------

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Free the end of a chunk that was shortened, and mark it as stale."""
        super().shrink(offset, old_bytes, new_bytes)
        tail = page_round(new_bytes)
        self._mark_stale(offset + tail, page_round(old_bytes) - tail)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Free a reservation, and mark it as stale because some of it may have been written."""
        super().cancel(offset, n_bytes)
        self._mark_stale(offset, n_bytes)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Free the chunk's space at ``offset``, and mark its bytes as stale until erased."""
        super().free(chunk, offset)
        self._mark_stale(offset, chunk.size)

    def take_stale(self) -> list[tuple[int, int]]:
        """Return free places in the file that may hold old bytes, with lengths, for ``erase``."""
        end = min(self.capacity, page_round(max(0, self.file_size() - self.HEADER_BYTES)))
        marked = {0: end} if self._stale is None else self._stale
        self._stale = {}
        places: dict[int, int] = {}
        for offset, n_bytes in marked.items():
            last = min(end, offset + page_round(n_bytes))
            for start, length in self._extents.free_within(offset, last):
                places[start] = max(length, places.get(start, 0))
        return sorted(places.items())

    def erase(self, places: Sequence[tuple[int, int]]) -> None:
        """Erase the bytes at these places.

        Raises:
            StoreError: The file system failed; a later call tries again.
        """
        offsets = [self.file_offset(offset) for offset, _ in places]
        try:
            _native.store_erase(self._file, offsets, [n_bytes for _, n_bytes in places])
        except StoreError:
            for offset, n_bytes in places:
                self._mark_stale(offset, n_bytes)
            raise

    def _mark_stale(self, offset: int, n_bytes: int) -> None:
        if self._stale is not None and n_bytes > 0:
            self._stale[offset] = max(n_bytes, self._stale.get(offset, 0))
            if len(self._stale) > _MAX_STALE_RANGES:
                self._stale = None

    def close(self) -> None:
        """Close the file descriptors."""
        os.close(self._direct)
        os.close(self._file)
