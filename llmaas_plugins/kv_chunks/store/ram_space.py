"""Space in the RAM tier: for chunks, for transfer buffers, and lent to spare cells."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.process_share import ProcessShare
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency
from llmaas_plugins.signals import signals_wait

__all__ = ["RamSpace"]


class RamSpace:
    """Allocator of RAM-tier bytes, which writes chunks to disk to evict them. Thread-safe.

    Attributes:
        process: Part of the tier that the memory limit of the process leaves to it.
    """

    def __init__(self, residency: ChunkResidency, writer: ChunkWriter | None) -> None:
        """Start without buffers; ``writer`` is None without a disk tier."""
        self._residency = residency
        self._writer = writer
        self.process = ProcessShare(residency, writer)
        self._closed_owners: deque[Hashable] = deque()

    @property
    def ram_budget(self) -> int:
        """Bytes of the RAM tier without a memory limit of the process."""
        return self._residency.ram.capacity

    @property
    def capacity(self) -> int:
        """Bytes of the RAM tier that it has or gets within the memory limit of the process."""
        return self._capacity(self.process.claimable())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all transfer buffers."""
        return self.process.buffer_bytes

    @property
    def withheld_bytes(self) -> int:
        """Bytes of the RAM tier that the memory limit of the process does not leave to it."""
        return self.process.withheld_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that neither that limit nor parked cells take from chunks and buffers."""
        return self.process.usable_bytes

    @signals_wait()
    def allocate_buffer(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Reserve RAM-tier pages for transfer buffers; return None if they do not fit."""
        offset = self.reserve(n_bytes)
        if offset is None:
            return None
        self.process.buffer_bytes += n_bytes
        with self._residency.changing():
            self._residency.ram.keep(offset)
        return self._residency.ram.view(offset, n_bytes)

    @signals_wait()
    def free_buffer(self, area: NDArray[np.uint8]) -> None:
        """Free buffers that ``allocate_buffer`` returned."""
        with self._residency.changing():
            ram = self._residency.ram
            ram.cancel(int(area.ctypes.data) - ram.address(0), len(area))
        self.process.buffer_bytes -= len(area)

    def close_owner(self, owner: Hashable) -> None:
        """Note that ``owner`` is gone, so that its working set and its loan can be dropped.

        The garbage collector calls this at any time, even inside the store. The work is therefore
        left to the next call that needs space.
        """
        self._closed_owners.append(owner)

    def lendable(self, owner: Hashable) -> int:
        """Return the RAM-tier bytes that neither contexts in use nor other owners need.

        The result is negative if the contexts in use do not all fit.
        """
        return self.lendable_and_capacity(owner)[0]

    def lendable_and_capacity(self, owner: Hashable) -> tuple[int, int]:
        """Return ``lendable`` and ``capacity``; the memory limit is asked once for both."""
        self.remove_closed_owners()
        claimable = self.process.claimable()
        with self._residency.lock:
            ram = self._residency.ram
            usable = ram.usable_bytes + self._residency.lent(owner) + claimable
            lendable = usable - self.buffer_bytes - self._residency.active_bytes
        return lendable, self._capacity(claimable)

    def lend(self, owner: Hashable, n_bytes: int) -> int:
        """Lend RAM-tier bytes to ``owner``, evicting chunks if needed; return the bytes lent."""
        self.remove_closed_owners()
        if n_bytes == self._residency.lent(owner):  # true of most switches
            return n_bytes
        self.process.claim(n_bytes - self._residency.lent(owner))
        for flushed in (False, True):
            with self._residency.changing():
                is_met = self._residency.lend(owner, n_bytes)
            if is_met or flushed or self._writer is None or not self._residency.dirty:
                break
            self._writer.flush()
        return self._residency.lent(owner)

    def remove_closed_owners(self) -> None:
        """Drop the working sets and loans of owners that are gone."""
        while self._closed_owners:
            with self._residency.changing():
                if self._closed_owners:  # no other thread removed it meanwhile
                    self._residency.remove_owner(self._closed_owners.popleft())

    def reserve_all(self, sizes: Sequence[int]) -> list[int]:
        """Reserve RAM for chunks of these sizes; return the offsets of the leading ones that fit.

        All that fit without a write to disk take the lock once.
        """
        offsets: list[int] = []
        if not sizes:
            return offsets
        try:
            self.remove_closed_owners()
            self.process.claim(sum(map(page_round, sizes)))
            with self._residency.changing():
                for n_bytes in sizes:
                    offset = self._residency.reserve_ram(n_bytes, None)
                    if offset is None:
                        break
                    offsets.append(offset)
            for n_bytes in sizes[len(offsets) :]:
                offset = self.reserve(n_bytes)
                if offset is None:
                    break
                offsets.append(offset)
        except BaseException:
            with self._residency.changing():
                for offset, n_bytes in zip(offsets, sizes, strict=False):
                    self._residency.ram.cancel(offset, n_bytes)
            raise
        return offsets

    def reserve(self, n_bytes: int, parent: bytes | None = None) -> int | None:
        """Reserve RAM without dropping ``parent``; write dirty chunks to disk first if needed."""
        self.remove_closed_owners()
        self.process.claim(n_bytes)
        for flushed in (False, True):
            with self._residency.changing():
                offset = self._residency.reserve_ram(n_bytes, parent)
            if offset is not None or flushed or self._writer is None or not self._residency.dirty:
                break
            self._writer.flush()
        if offset is None:
            with self._residency.changing():
                offset = self._residency.reserve_ram_by_loss(n_bytes, parent)
        if offset is None:
            self._residency.counters.no_room += 1
        return offset

    def _capacity(self, claimable: int) -> int:
        mine = self._residency.ram.capacity - self.process.withheld_bytes
        return max(0, mine + claimable)
