"""Two bounded places for encoded chunks, each evicting what its queue says."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.extents import PAGE, ExtentAllocator, page_round
from llmaas_plugins.kv_chunks.files import FILES
from llmaas_plugins.kv_chunks.memory import anonymous, give_back
from llmaas_plugins.kv_chunks.queues import Eviction, Queue
from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["DiskTier", "RamTier", "Tier"]

_MOST_MARKS = 1 << 16
_WORTH_MOVING = 32  # free space, in gaps, that is this part of the arena


class Tier:
    """Space for chunks, and their queue.

    Attributes:
        queue: The chunks here.
    """

    def __init__(self, capacity: int, eviction: Eviction) -> None:
        """Nothing is stored yet; at most ``capacity`` bytes will be."""
        self._extents = ExtentAllocator(capacity)
        self.queue = Queue(eviction)

    @property
    def used_bytes(self) -> int:
        """Bytes taken, whole pages."""
        return self._extents.used

    @property
    def capacity(self) -> int:
        """Bytes there are."""
        return self._extents.capacity

    @property
    def room(self) -> int:
        """Bytes of them that chunks may take."""
        return self._extents.capacity

    def reserve(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> int | None:
        """Offset of room for ``n_bytes``, after evicting as few chunks as needed.

        Args:
            n_bytes: Room wanted.
            evictable: Whether a chunk may go.
            evict: Called for each victim; it must call ``free`` for it.

        Returns:
            None when there is no room even then; nothing was evicted if the total says so at once.
        """
        if n_bytes > self.room:
            return None
        offset = self._allocate(n_bytes)
        while offset is None and self._evict_one(evictable, evict):
            offset = self._allocate(n_bytes)
        return offset

    def _evict_one(
        self, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> bool:
        """Evict the next chunk that may go; whether there was one."""
        victim = next(filter(evictable, self.queue), None)
        if victim is not None:
            evict(victim)
        return victim is not None

    def _allocate(self, n_bytes: int) -> int | None:
        return self._extents.allocate(n_bytes)

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Give back the unused end of a reservation."""
        self._extents.shrink(offset, old_bytes, new_bytes)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Give back a reservation that no chunk took."""
        self._extents.release(offset, n_bytes)

    def claim(self, offset: int, n_bytes: int) -> bool:
        """Reserve exactly this place (a chunk found at start-up)."""
        return self._extents.claim(offset, n_bytes)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Forget the chunk's bytes at ``offset``."""
        self.queue.leave(chunk)
        self._extents.release(offset, chunk.size)


class RamTier(Tier):
    """An anonymous mapping of fixed size; pages are committed as they are first written.

    Attributes:
        lent: Bytes of the capacity that are memory elsewhere; chunks leave them free.
    """

    def __init__(self, budget: Budget, eviction: Eviction) -> None:
        """Map and account for what the budget has left."""
        capacity = budget.limit - budget.used
        budget.reserve(capacity)
        super().__init__(capacity, eviction)
        self.lent = 0
        self._bytes = anonymous(self.capacity)
        self._holds = np.zeros(self.capacity // PAGE, dtype=np.bool_)  # memory, by page
        self._held_bytes = 0
        self._base = int(self._bytes.ctypes.data)

    @property
    def room(self) -> int:
        """Bytes that chunks may take."""
        return self.capacity - self.lent

    def lend(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> bool:
        """Let so many bytes in all be lent, after evicting as few chunks as needed.

        Returns:
            False when there is no room for all of that; what there is is lent then.
        """
        is_met = True
        while is_met and self.used_bytes + n_bytes > self.capacity:
            is_met = self._evict_one(evictable, evict)
        self.lent = min(n_bytes, self.capacity - self.used_bytes)
        self._hold_no_more()
        return is_met

    def _allocate(self, n_bytes: int) -> int | None:
        if self.used_bytes + page_round(n_bytes) > self.room:
            return None
        offset = super()._allocate(n_bytes)
        if offset is not None:
            self._hold(offset, n_bytes)
            self._hold_no_more()
        return offset

    def _hold(self, offset: int, n_bytes: int) -> None:
        """These pages will be written to."""
        pages = self._holds[offset // PAGE : (offset + page_round(n_bytes)) // PAGE]
        self._held_bytes += PAGE * int(len(pages) - np.count_nonzero(pages))
        pages[:] = True

    def _hold_no_more(self) -> None:
        """Let no free page hold memory, if chunks and what is lent would have too much together."""
        if self._held_bytes + self.lent <= self.capacity:
            return
        for offset, n_bytes in self._extents.free_within(0, self.capacity):
            pages = self._holds[offset // PAGE : (offset + n_bytes) // PAGE]
            if pages.any():
                give_back(self._bytes[offset : offset + n_bytes])
                pages[:] = False
        self._held_bytes = PAGE * int(np.count_nonzero(self._holds))

    def address(self, offset: int) -> int:
        """Address of a byte of the arena."""
        return self._base + offset

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """A window on the arena."""
        return self._bytes[offset : offset + n_bytes]

    def compact(self) -> None:
        """Close the gaps that cut chunks left, if they add up; chunks in use stay in place."""
        free = self.room - self.used_bytes
        if free < self.capacity // _WORTH_MOVING or 2 * self._extents.longest() > free:
            return
        for chunk in sorted(self.queue, key=lambda chunk: chunk.ram):
            if chunk.pins == 0:
                self._extents.release(chunk.ram, chunk.size)
                place = self._extents.allocate(chunk.size)
                assert place is not None  # its own, at worst
                if place != chunk.ram:
                    ctypes.memmove(
                        self.address(place), self.address(chunk.ram), page_round(chunk.size)
                    )
                    chunk.ram = place
                    self._hold(place, chunk.size)
        self._hold_no_more()


class DiskTier(Tier):
    """The slab file. Page 0 is the header; chunk extents follow.

    Space that is free may hold old chunks' bytes until it is written again, or erased.
    """

    HEADER_BYTES = 4096

    def __init__(self, path: Path, budget: int) -> None:
        """Open or create the file of at most ``budget`` bytes, mode 0600.

        It is read and written past the page cache where the file system can.

        Raises:
            StoreError: It is no regular file, or cannot be opened or made private.
        """
        super().__init__(max(0, budget - self.HEADER_BYTES), "lru")
        self._stale: dict[int, int] | None = None  # freed places and sizes; None: all free space
        self._file = FILES.open(path, os.O_RDWR | os.O_CREAT)
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:  # tmpfs, for one
            self._direct = os.dup(self._file)

    @property
    def fd(self) -> int:
        """File descriptor for the native reads and writes of whole blocks."""
        return self._direct

    def file_offset(self, offset: int) -> int:
        """Where an extent lies in the file."""
        return self.HEADER_BYTES + offset

    def file_bytes(self) -> int:
        """Current length of the file."""
        return os.fstat(self._file).st_size

    def read_header(self) -> bytes:
        """The header page; shorter when the file is new."""
        return os.pread(self._file, self.HEADER_BYTES, 0)

    def write_header(self, header: bytes) -> None:
        """Start an empty slab under ``header``, which outlasts a power cut."""
        os.ftruncate(self._file, 0)
        page, n = header.ljust(self.HEADER_BYTES, b"\0"), 0
        while n < len(page):
            n += os.pwrite(self._file, page[n:], n)
        os.fsync(self._file)

    def trim(self) -> None:
        """Shorten a file that was written under a larger budget."""
        if self.file_bytes() > self.file_offset(self.capacity):
            os.ftruncate(self._file, self.file_offset(self.capacity))

    def cut(self) -> None:
        """Shorten the file to what is in use."""
        runs = self._extents.free_within(0, self.capacity)
        is_tail = bool(runs) and sum(runs[-1]) == self.capacity
        end = self.file_offset(runs[-1][0] if is_tail else self.capacity)
        if self.file_bytes() > end:
            os.ftruncate(self._file, end)

    # -- old bytes ------------------------------------------------------------------------------

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Give back the end of a chunk that was cut."""
        super().shrink(offset, old_bytes, new_bytes)
        tail = page_round(new_bytes)
        self._mark(offset + tail, page_round(old_bytes) - tail)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Give back a reservation; some of it may have been written."""
        super().cancel(offset, n_bytes)
        self._mark(offset, n_bytes)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Forget the chunk's bytes at ``offset``; they lie there until erased."""
        super().free(chunk, offset)
        self._mark(offset, chunk.size)

    def take_stale(self) -> list[tuple[int, int]]:
        """Free places in the file that may hold old bytes, and their lengths; for ``erase``."""
        end = min(self.capacity, page_round(max(0, self.file_bytes() - self.HEADER_BYTES)))
        marked = {0: end} if self._stale is None else self._stale
        self._stale = {}
        places: dict[int, int] = {}
        for offset, n_bytes in marked.items():
            last = min(end, offset + page_round(n_bytes))
            for start, length in self._extents.free_within(offset, last):
                places[start] = max(length, places.get(start, 0))
        return sorted(places.items())

    def erase(self, places: Sequence[tuple[int, int]]) -> None:
        """Make sure that nothing can be read at these places any more.

        Raises:
            StoreError: The file system failed; a later call tries again.
        """
        offsets = [self.file_offset(offset) for offset, _ in places]
        try:
            _native.store_erase(self._file, offsets, [n_bytes for _, n_bytes in places])
        except StoreError:
            for offset, n_bytes in places:
                self._mark(offset, n_bytes)
            raise

    def _mark(self, offset: int, n_bytes: int) -> None:
        if self._stale is not None and n_bytes > 0:
            self._stale[offset] = max(n_bytes, self._stale.get(offset, 0))
            if len(self._stale) > _MOST_MARKS:
                self._stale = None

    def close(self) -> None:
        """Close the file."""
        os.close(self._direct)
        os.close(self._file)
