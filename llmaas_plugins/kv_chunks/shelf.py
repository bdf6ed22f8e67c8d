"""Chunks, the two tiers they are in, and the rules that bind these."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterable, Sequence

from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.counters import Counters
from llmaas_plugins.kv_chunks.extents import page_round
from llmaas_plugins.kv_chunks.index import ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.queues import Eviction
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
        active_bytes: What the chunks take, in whole pages, that were used since this was made.
    """

    def __init__(self, budget: Budget, disk: DiskTier | None, eviction: Eviction) -> None:
        """Take what ``budget`` has left for the RAM tier."""
        self.lock = threading.RLock()
        self.tree = ChunkTree()
        self.ram = RamTier(budget, eviction)
        self.disk = disk
        self.dirty: dict[bytes, Chunk] = {}
        self.update = IndexUpdate()
        self.counters = Counters()
        self.active_bytes = 0
        self._clock = itertools.count(1)
        self._working: dict[Hashable, frozenset[Chunk]] = {}
        self._lent: dict[Hashable, int] = {}

    # -- use ------------------------------------------------------------------------------------

    def touch(self, path: Sequence[Chunk]) -> None:
        """The chunks were used: the first one last, so that contexts get shorter from their end."""
        for chunk in reversed(path):
            self._use(chunk)
            self.ram.queue.touch(chunk)
            self._touch_disk(chunk)

    def order_on_disk(self, written: Iterable[Chunk]) -> None:
        """Let chunks that are new on disk be as recently used as they are."""
        for chunk in sorted(written, key=lambda chunk: chunk.used):
            self._touch_disk(chunk)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk]) -> None:
        """Let ``owner``'s chunks, in place of those before, go last (LLMS §3.4)."""
        self._working[owner] = frozenset(chunks)

    # -- room -----------------------------------------------------------------------------------

    def may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may be dropped: contexts get shorter from their end only."""
        return chunk.pins == 0 and self.tree.is_last(chunk)

    def reserve_ram(self, n_bytes: int, parent: bytes | None) -> int | None:
        """Room in the RAM tier, without dropping ``parent``; what is locked goes last."""

        def evictable(chunk: Chunk) -> bool:
            return self._may_leave_ram(chunk) and (self.disk is not None or chunk.id.key != parent)

        offset = self.ram.reserve(
            n_bytes, lambda chunk: not self._is_locked(chunk) and evictable(chunk), self.reclaim
        )
        if offset is None and any(self._working.values()):
            offset = self.ram.reserve(n_bytes, evictable, self.reclaim)
        return offset

    def lend(self, owner: Hashable, n_bytes: int) -> bool:
        """Let ``owner`` have so many bytes of the RAM tier's in all; False if it gets fewer."""
        others = sum(n for one, n in self._lent.items() if one != owner)
        is_met = self.ram.lend(
            others + n_bytes,
            lambda chunk: not self._is_locked(chunk) and self._may_leave_ram(chunk),
            self.reclaim,
        )
        self._lent[owner] = self.ram.lent - others
        if not self._lent[owner]:
            del self._lent[owner]
        return is_met

    def forget(self, owner: Hashable) -> None:
        """Give up what an owner that is gone was lent, and its working set."""
        self._working.pop(owner, None)
        self.lend(owner, 0)

    def lent(self, owner: Hashable) -> int:
        """Bytes that ``owner`` was lent."""
        return self._lent.get(owner, 0)

    def reserve_unwritten(self, n_bytes: int, parent: bytes | None) -> int | None:
        """Room in the RAM tier at the cost of chunks that are not on disk, and cannot get there."""
        return self.ram.reserve(
            n_bytes,
            lambda chunk: self.may_go(chunk) and chunk.id.key != parent,
            self.reclaim,
        )

    def reserve_disk(self, n_bytes: int) -> int | None:
        """Room in the disk tier."""
        assert self.disk is not None
        return self.disk.reserve(n_bytes, self.may_go, self._leave_disk)

    def _is_locked(self, chunk: Chunk) -> bool:
        return any(chunk in chunks for chunks in self._working.values())

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        """Whether a chunk may leave RAM without a need to write it."""
        if self.disk is None:
            return self.may_go(chunk)
        return chunk.pins == 0 and chunk.disk != ABSENT

    def reclaim(self, chunk: Chunk) -> None:
        """Take a chunk out of RAM; out of everything if it is nowhere else."""
        if chunk.disk == ABSENT:
            self.drop(chunk)
        else:
            self._leave_ram(chunk)
        self.counters.ram_reclaimed += 1

    # -- change ---------------------------------------------------------------------------------

    def enter(self, chunk: Chunk) -> None:
        """A chunk whose bytes are in RAM comes into the tree, in place of its ghost, if any."""
        self.tree.add(chunk)
        self._use(chunk)
        self.ram.queue.enter(chunk)
        if self.disk is not None:
            self.dirty[chunk.id.key] = chunk

    def notice(self, chunk: Chunk, attention: float, seen: float) -> None:
        """A chunk's tokens got some more attention; the index is told when that doubles."""
        chunk.attention += attention
        chunk.seen += seen
        if chunk.disk != ABSENT and chunk.seen > 2 * chunk.noted:
            self.note_row(chunk)

    def cut(self, chunk: Chunk, size: int, bits: int) -> None:
        """Demote a chunk: it keeps the first ``size`` bytes of its payload, in both tiers."""
        old = chunk.size
        is_in_ram = self.ram.queue.leave(chunk)
        chunk.size, chunk.bits = size, bits
        if chunk.used:
            self.active_bytes -= page_round(old) - page_round(size)
        if is_in_ram:
            self.ram.shrink(chunk.ram, old, size)
            self.ram.queue.enter(chunk)
        if chunk.disk != ABSENT and self.disk is not None:
            self.disk.shrink(chunk.disk, old, size)
            self.note_row(chunk)
            self.update.frees_room = True
        self.counters.cut_chunks += 1
        self.counters.cut_bytes += old - size

    def note_row(self, chunk: Chunk) -> None:
        """Let the index know where a chunk is on disk, and what is known about it."""
        chunk.noted = chunk.seen
        row = ChunkRow(chunk.id, chunk.disk, chunk.size, chunk.bits, chunk.attention, chunk.seen)
        self.update.added[chunk.id.key] = row

    def lose(self, chunk: Chunk) -> None:
        """A chunk's bytes are unusable: its ghost stays as long as others continue it."""
        if self.tree.is_last(chunk):
            self.drop(chunk)
            return
        self.tree.add(Chunk(chunk.id, 0, attention=chunk.attention, seen=chunk.seen))
        self._forget_bytes(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Take a chunk out of the tree and of both tiers. A pinned one keeps its RAM until then.

        A ghost that nothing continues then goes along; so one of several may be gone already.
        """
        if self.tree.get(chunk.id.key) is not chunk:
            return
        heads_move = bool(chunk.heads)
        parent = self.tree.get(chunk.id.parent)
        self.tree.remove(chunk)
        if heads_move:
            self.update.heads = self.tree.contexts()
        self._forget_bytes(chunk)
        if parent is not None and parent.is_ghost and self.tree.is_last(parent):
            self.drop(parent)

    def leave_disk(self) -> None:
        """From now on there is only RAM, and what is in it."""
        self.disk = None
        self.dirty.clear()
        self.update = IndexUpdate()
        for chunk in list(self.tree):
            chunk.disk = ABSENT
            if chunk.ram == ABSENT:
                self.tree.remove(chunk)
                self._rest(chunk)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """End of the chunks' use by a transfer."""
        for chunk in chunks:
            chunk.pins -= 1
            gone = self.tree.get(chunk.id.key) is not chunk
            if gone and chunk.pins == 0 and chunk.ram != ABSENT:
                self._leave_ram(chunk)

    # -- inside ---------------------------------------------------------------------------------

    def _use(self, chunk: Chunk) -> None:
        if not chunk.used:
            self.active_bytes += page_round(chunk.size)
        chunk.used = next(self._clock)

    def _rest(self, chunk: Chunk) -> None:
        if chunk.used:
            self.active_bytes -= page_round(chunk.size)

    def _forget_bytes(self, chunk: Chunk) -> None:
        self._rest(chunk)
        self.dirty.pop(chunk.id.key, None)
        if chunk.disk != ABSENT and self.disk is not None:
            self.disk.free(chunk, chunk.disk)
            self.update.added.pop(chunk.id.key, None)
            self.update.used.pop(chunk.id.key, None)
            self.update.removed.append(chunk.id.key)
            chunk.disk = ABSENT
        if chunk.ram != ABSENT and chunk.pins == 0:
            self._leave_ram(chunk)

    def _leave_ram(self, chunk: Chunk) -> None:
        self.ram.free(chunk, chunk.ram)
        chunk.ram = ABSENT

    def _touch_disk(self, chunk: Chunk) -> None:
        if self.disk is not None and chunk.disk != ABSENT:
            self.disk.queue.touch(chunk)
            self.update.used.pop(chunk.id.key, None)
            self.update.used[chunk.id.key] = None

    def _leave_disk(self, chunk: Chunk) -> None:
        self.counters.disk_evicted += 1
        self.drop(chunk)
