"""The RAM tier: an arena of encoded chunks, and how much of it holds memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import BudgetError
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.huge_pages import discard_pages, map_huge_pages
from llmaas_plugins.kv_chunks.store.tier import Tier
from llmaas_plugins.kv_chunks.store.tree import Chunk

__all__ = ["RamTier"]

_COMPACT_DIVISOR = 32  # compact if at least 1/32 of the arena is free


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
        self._pending: dict[int, tuple[int, int]] = {}  # reserved bytes and thread, by offset

    @property
    def usable_bytes(self) -> int:
        """Bytes that chunks may use."""
        return self.capacity - self.lent

    @property
    def resident_bytes(self) -> int:
        """Bytes of pages that were written and not discarded."""
        return self._resident_bytes

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

    def reserve(
        self, n_bytes: int, evictable: Callable[[Chunk], bool], evict: Callable[[Chunk], None]
    ) -> int | None:
        """Reserve space for a transfer of this thread, until ``take``, ``keep`` or ``cancel``."""
        offset = super().reserve(n_bytes, evictable, evict)
        if offset is not None:
            self._pending[offset] = n_bytes, threading.get_ident()
        return offset

    def take(self, chunk: Chunk, offset: int, *, is_oldest: bool = False) -> None:
        """Give reserved space to a chunk, whose bytes are there now."""
        self.keep(offset)
        chunk.ram = offset
        self.queue.add(chunk, is_oldest=is_oldest)

    def keep(self, offset: int) -> None:
        """Keep reserved space beyond the transfer that reserved it."""
        self._pending.pop(offset, None)

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Free the unused end of a reservation."""
        super().shrink(offset, old_bytes, new_bytes)
        if offset in self._pending:
            self._pending[offset] = new_bytes, self._pending[offset][1]

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Free a reservation that no chunk used."""
        self.keep(offset)
        super().cancel(offset, n_bytes)

    def cancel_other_threads(self) -> None:
        """Free what transfers of other threads reserved, in a forked child without them."""
        for offset, (n_bytes, thread) in list(self._pending.items()):
            if thread != threading.get_ident():
                self.cancel(offset, n_bytes)

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
                new_offset = self._extents.allocate(chunk.size)
                assert new_offset is not None  # at least its old place is free
                if new_offset != chunk.ram:
                    ctypes.memmove(
                        self.address(new_offset), self.address(chunk.ram), page_round(chunk.size)
                    )
                    chunk.ram = new_offset
                    self._mark_resident(new_offset, chunk.size)
        self._discard_free_pages()
