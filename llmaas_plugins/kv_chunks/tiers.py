"""Two bounded places for encoded chunks, each evicting its least recently used ones."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.extents import ExtentAllocator
from llmaas_plugins.kv_chunks.memory import anonymous
from llmaas_plugins.kv_chunks.tree import Chunk

__all__ = ["DiskTier", "RamTier", "Tier"]


class Tier:
    """Space for chunks and the order in which they were used.

    A context's chunks are touched last chunk first, so a chunk is older than the ones before it,
    and eviction shortens contexts from their end.
    """

    def __init__(self, capacity: int) -> None:
        """Nothing is stored yet; at most ``capacity`` bytes will be."""
        self._extents = ExtentAllocator(capacity)
        self._lru: OrderedDict[Chunk, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes taken, whole pages."""
        return self._extents.used

    @property
    def capacity(self) -> int:
        """Bytes there are."""
        return self._extents.capacity

    def __len__(self) -> int:
        """Number of chunks here."""
        return len(self._lru)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks here, least recently used first."""
        return iter(self._lru)

    def reserve(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> int | None:
        """Offset of room for ``n_bytes``, after evicting as few old chunks as needed.

        Args:
            n_bytes: Room wanted.
            evictable: Whether a chunk may go.
            evict: Called for each victim; it must call ``free`` for it.

        Returns:
            None when there is no room even then; nothing was evicted if the total says so at once.
        """
        if n_bytes > self._extents.capacity:
            return None
        offset = self._extents.allocate(n_bytes)
        while offset is None:
            victim = next(filter(evictable, self), None)
            if victim is None:
                return None
            evict(victim)
            offset = self._extents.allocate(n_bytes)
        return offset

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Give back the unused end of a reservation."""
        self._extents.shrink(offset, old_bytes, new_bytes)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Give back a reservation that no chunk took."""
        self._extents.release(offset, n_bytes)

    def claim(self, offset: int, n_bytes: int) -> bool:
        """Reserve exactly this place (a chunk found at start-up)."""
        return self._extents.claim(offset, n_bytes)

    def enter(self, chunk: Chunk) -> None:
        """The chunk's bytes are here now; it is the most recently used one."""
        self._lru[chunk] = None

    def touch(self, chunk: Chunk) -> None:
        """The chunk was used."""
        if chunk in self._lru:
            self._lru.move_to_end(chunk)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Forget the chunk's bytes at ``offset``."""
        del self._lru[chunk]
        self._extents.release(offset, chunk.size)


class RamTier(Tier):
    """An anonymous mapping of fixed size; pages are committed as they are first written."""

    def __init__(self, budget: Budget) -> None:
        """Map and account for what the budget has left."""
        capacity = budget.limit - budget.used
        budget.reserve(capacity)
        super().__init__(capacity)
        self._bytes = anonymous(self.capacity)
        self._base = int(self._bytes.ctypes.data)

    def address(self, offset: int) -> int:
        """Address of a byte of the arena."""
        return self._base + offset

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """A window on the arena."""
        return self._bytes[offset : offset + n_bytes]


class DiskTier(Tier):
    """The slab file. Page 0 is the header; chunk extents follow."""

    HEADER_BYTES = 4096

    def __init__(self, path: Path, budget: int) -> None:
        """Open or create the file of at most ``budget`` bytes, mode 0600.

        It is read and written past the page cache where the file system can.
        """
        super().__init__(max(0, budget - self.HEADER_BYTES))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            self._direct = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
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
        """Start an empty slab under ``header``."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, header.ljust(self.HEADER_BYTES, b"\0"), 0)

    def trim(self) -> None:
        """Shorten a file that was written under a larger budget."""
        if self.file_bytes() > self.file_offset(self.capacity):
            os.ftruncate(self._file, self.file_offset(self.capacity))

    def close(self) -> None:
        """Close the file."""
        os.close(self._direct)
        os.close(self._file)
