"""Chunks, the two tiers they are in, and the rules that bind these."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.counters import Counters
from llmaas_plugins.kv_chunks.index import IndexUpdate
from llmaas_plugins.kv_chunks.tiers import DiskTier, RamTier
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, ChunkTree

__all__ = ["Shelf"]


class Shelf:
    """State of a store. Hold ``lock`` for every call; none of them does I/O.

    Attributes:
        lock: Guards everything here.
        tree: The chunks.
        ram: Their RAM tier.
        disk: Their disk tier, if there is one.
        dirty: Chunks that are to be written to disk, by key.
        update: What the index does not know yet.
        counters: What happened.
    """

    def __init__(self, budget: Budget, disk: DiskTier | None) -> None:
        """Take what ``budget`` has left for the RAM tier."""
        self.lock = threading.RLock()
        self.tree = ChunkTree()
        self.ram = RamTier(budget)
        self.disk = disk
        self.dirty: dict[bytes, Chunk] = {}
        self.update = IndexUpdate()
        self.counters = Counters()

    def touch(self, path: Sequence[Chunk]) -> None:
        """The chunks were used: the first one last, so that contexts get shorter from their end."""
        for chunk in reversed(path):
            self.ram.touch(chunk)
            self._touch_disk(chunk)

    def order_on_disk(self, written: Iterable[Chunk]) -> None:
        """Let chunks be as recently used on disk as they are in RAM."""
        new = set(written)
        for chunk in self.ram:
            if chunk in new:
                self._touch_disk(chunk)

    def may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may be dropped: contexts get shorter from their end only."""
        return chunk.pins == 0 and self.tree.is_last(chunk)

    def reserve_ram(self, n_bytes: int, parent: bytes | None) -> int | None:
        """Room in the RAM tier, without dropping ``parent``."""

        def evictable(chunk: Chunk) -> bool:
            if self.disk is not None:
                return chunk.pins == 0 and chunk.disk != ABSENT
            return self.may_go(chunk) and chunk.id.key != parent

        return self.ram.reserve(n_bytes, evictable, self.reclaim)

    def reserve_disk(self, n_bytes: int) -> int | None:
        """Room in the disk tier."""
        assert self.disk is not None
        return self.disk.reserve(n_bytes, self.may_go, self._leave_disk)

    def reclaim(self, chunk: Chunk) -> None:
        """Take a chunk out of RAM; out of everything if it is nowhere else."""
        if chunk.disk == ABSENT:
            self.drop(chunk)
        else:
            self.ram.free(chunk, chunk.ram)
            chunk.ram = ABSENT
        self.counters.ram_reclaimed += 1

    def drop(self, chunk: Chunk) -> None:
        """Take a chunk out of the tree and of both tiers. A pinned one keeps its RAM until then."""
        heads_move = bool(chunk.heads)
        self.tree.remove(chunk)
        if heads_move:
            self.update.heads = self.tree.contexts()
        self.dirty.pop(chunk.id.key, None)
        if chunk.disk != ABSENT and self.disk is not None:
            self.disk.free(chunk, chunk.disk)
            self.update.added.pop(chunk.id.key, None)
            self.update.used.pop(chunk.id.key, None)
            self.update.removed.append(chunk.id.key)
            chunk.disk = ABSENT
        if chunk.ram != ABSENT and chunk.pins == 0:
            self.ram.free(chunk, chunk.ram)
            chunk.ram = ABSENT

    def leave_disk(self) -> None:
        """From now on there is only RAM, and what is in it."""
        self.disk = None
        self.dirty.clear()
        self.update = IndexUpdate()
        for chunk in list(self.tree):
            chunk.disk = ABSENT
            if chunk.ram == ABSENT:
                self.tree.remove(chunk)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """End of the chunks' use by a transfer."""
        for chunk in chunks:
            chunk.pins -= 1
            gone = self.tree.get(chunk.id.key) is not chunk
            if gone and chunk.pins == 0 and chunk.ram != ABSENT:
                self.ram.free(chunk, chunk.ram)
                chunk.ram = ABSENT

    def _touch_disk(self, chunk: Chunk) -> None:
        if self.disk is not None and chunk.disk != ABSENT:
            self.disk.touch(chunk)
            self.update.used.pop(chunk.id.key, None)
            self.update.used[chunk.id.key] = None

    def _leave_disk(self, chunk: Chunk) -> None:
        self.counters.disk_evicted += 1
        self.drop(chunk)
