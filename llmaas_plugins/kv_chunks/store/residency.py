"""In-memory state of a store: its chunks, their two tiers, and the rules between them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence

from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.counters import StoreCounters
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.index import ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.store.ram_tier import RamTier
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, ChunkTree
from llmaas_plugins.signals import is_uninterrupted, signals_wait

__all__ = ["ChunkResidency"]


class ChunkResidency:
    """State of a store. Hold ``lock`` to read it, and ``changing`` to change it; no call does I/O.

    Attributes:
        lock: Lock that guards all of this state.
        tree: All chunks.
        ram: RAM tier.
        disk: Disk tier, or None.
        dirty: Chunks still to be written to disk, by key.
        update: Changes that the index does not contain yet.
        counters: Event counters.
        active_bytes: Bytes, in whole pages, of the chunks used since this object was created.
    """

    def __init__(self, budget: Budget, disk: DiskTier | None, eviction: EvictionPolicy) -> None:
        """Give the rest of ``budget`` to the RAM tier."""
        self.lock = threading.RLock()
        self.tree = ChunkTree()
        self.ram = RamTier(budget, eviction)
        self.disk = disk
        self.dirty: dict[bytes, Chunk] = {}
        self.update = IndexUpdate()
        self.counters = StoreCounters()
        self.active_bytes = 0
        self._clock = itertools.count(1)
        self._working: dict[Hashable, frozenset[Chunk]] = {}
        self._lent: dict[Hashable, int] = {}
        self._pins: dict[int, list[Chunk]] = {}  # by thread

    def changing(self) -> contextlib.AbstractContextManager[object]:
        """Hold the lock and delay signals, because an exception would leave half a change."""
        return self.lock if is_uninterrupted() else self._changing()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with signals_wait(), self.lock:
            yield

    # -- use ------------------------------------------------------------------------------------

    def touch(self, path: Sequence[Chunk]) -> None:
        """Mark chunks as used, the first one last, so that contexts shrink from their end."""
        for chunk in reversed(path):
            self._mark_used(chunk)
            self.ram.queue.touch(chunk)
            self._touch_disk(chunk)

    def mark_written_used(self, written: Iterable[Chunk]) -> None:
        """Put chunks that are new on disk into the disk tier's order of use."""
        for chunk in sorted(written, key=lambda chunk: chunk.used):
            self._touch_disk(chunk)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk]) -> None:
        """Set the working set of ``owner``, whose chunks are evicted last (LLMS §3.4)."""
        self._working[owner] = frozenset(chunks)

    def working_bytes(self) -> int:
        """Return the bytes of the chunks in working sets, in whole pages."""
        return sum(page_round(chunk.size) for chunk in frozenset().union(*self._working.values()))

    # -- transfers ------------------------------------------------------------------------------

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Keep the RAM of chunks for a transfer of this thread, which must also unpin them."""
        for chunk in chunks:
            chunk.pins += 1
        if chunks:
            self._pins.setdefault(threading.get_ident(), []).extend(chunks)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Unpin chunks that a transfer of this thread no longer uses."""
        if chunks:
            self._unpin(threading.get_ident(), list(chunks))

    def end_other_transfers(self) -> None:
        """End the transfers of other threads, which do not exist in a forked child."""
        for thread, chunks in list(self._pins.items()):
            if thread != threading.get_ident():
                self._unpin(thread, list(chunks))
        self.ram.cancel_other_threads()

    def _unpin(self, thread: int, chunks: list[Chunk]) -> None:
        pinned = self._pins[thread]
        if pinned[-len(chunks) :] == chunks:
            del pinned[-len(chunks) :]
        else:  # transfers that did not end in reverse order
            for chunk in chunks:
                pinned.remove(chunk)
        if not pinned:
            del self._pins[thread]
        for chunk in chunks:
            chunk.pins -= 1
            is_gone = self.tree.get(chunk.id.key) is not chunk
            if is_gone and chunk.pins == 0 and chunk.ram != ABSENT:
                self._free_ram(chunk)

    # -- space ----------------------------------------------------------------------------------

    def is_evictable(self, chunk: Chunk) -> bool:
        """Return whether a chunk may be dropped: only unpinned ones that end a chain may."""
        return chunk.pins == 0 and self.tree.is_leaf(chunk)

    def reserve_ram(self, n_bytes: int, parent: bytes | None) -> int | None:
        """Reserve space in the RAM tier, without dropping ``parent``, or return None.

        Chunks of working sets are evicted only if nothing else suffices.
        """

        def evictable(chunk: Chunk) -> bool:
            return self._is_ram_evictable(chunk) and (
                self.disk is not None or chunk.id.key != parent
            )

        offset = self.ram.reserve(
            n_bytes,
            lambda chunk: not self._is_locked(chunk) and evictable(chunk),
            self.evict_from_ram,
        )
        if offset is None and any(self._working.values()):
            offset = self.ram.reserve(n_bytes, evictable, self.evict_from_ram)
        return offset

    def lend(self, owner: Hashable, n_bytes: int, *, may_lose: bool = False) -> bool:
        """Set the RAM-tier bytes lent to ``owner``; return False if it gets fewer.

        Chunks of working sets, and chunks that cannot be written, leave RAM only if ``may_lose``.
        """
        others = sum(n for one, n in self._lent.items() if one != owner)
        is_met = self.ram.lend(
            others + n_bytes,
            lambda chunk: (
                (self._is_ram_evictable(chunk) or self.is_evictable(chunk))
                if may_lose
                else (not self._is_locked(chunk) and self._is_ram_evictable(chunk))
            ),
            self.evict_from_ram,
        )
        self._lent[owner] = self.ram.lent - others
        if not self._lent[owner]:
            del self._lent[owner]
        return is_met

    def remove_owner(self, owner: Hashable) -> None:
        """Take back the memory lent to an owner that is gone, and drop its working set."""
        self._working.pop(owner, None)
        self.lend(owner, 0)

    def lent(self, owner: Hashable) -> int:
        """Return the bytes lent to ``owner``."""
        return self._lent.get(owner, 0)

    def reserve_ram_by_loss(self, n_bytes: int, parent: bytes | None) -> int | None:
        """Reserve RAM, evicting even chunks that are not on disk and cannot be written."""
        return self.ram.reserve(
            n_bytes,
            lambda chunk: self.is_evictable(chunk) and chunk.id.key != parent,
            self.evict_from_ram,
        )

    def reserve_disk(self, n_bytes: int) -> int | None:
        """Reserve space in the disk tier; return its offset or None."""
        assert self.disk is not None
        return self.disk.reserve(n_bytes, self.is_evictable, self._evict_from_disk)

    def _is_locked(self, chunk: Chunk) -> bool:
        return any(chunk in chunks for chunks in self._working.values())

    def _is_ram_evictable(self, chunk: Chunk) -> bool:
        """Return whether a chunk may leave RAM without being written first."""
        if self.disk is None:
            return self.is_evictable(chunk)
        return chunk.pins == 0 and chunk.disk != ABSENT

    def evict_from_ram(self, chunk: Chunk) -> None:
        """Evict a chunk from RAM, and drop it altogether if it is not on disk."""
        if chunk.disk == ABSENT:
            self.drop(chunk)
        else:
            self._free_ram(chunk)
        self.counters.ram_reclaimed += 1

    # -- change ---------------------------------------------------------------------------------

    def add(self, chunk: Chunk) -> None:
        """Add a chunk whose bytes are in RAM to the tree, replacing its ghost if there is one."""
        self.tree.add(chunk)
        self._mark_used(chunk)
        self.ram.take(chunk, chunk.ram)
        if self.disk is not None:
            self.dirty[chunk.id.key] = chunk

    def add_attention(self, chunk: Chunk, attention: float, n_scores: float) -> None:
        """Add attention to a chunk; update the index once the score count has doubled."""
        chunk.attention += attention
        chunk.n_scores += n_scores
        if chunk.disk != ABSENT and chunk.n_scores > 2 * chunk.n_indexed_scores:
            self.queue_index_update(chunk)

    def truncate(self, chunk: Chunk, size: int, bits: int) -> None:
        """Shorten a chunk's payload to its first ``size`` bytes in both tiers."""
        old = chunk.size
        is_in_ram = self.ram.queue.remove(chunk)
        chunk.size, chunk.bits = size, bits
        if chunk.used:
            self.active_bytes -= page_round(old) - page_round(size)
        if is_in_ram:
            self.ram.shrink(chunk.ram, old, size)
            self.ram.queue.add(chunk)
        if chunk.disk != ABSENT and self.disk is not None:
            self.disk.shrink(chunk.disk, old, size)
            self.queue_index_update(chunk)
        self.counters.cut_chunks += 1
        self.counters.cut_bytes += old - size

    def queue_index_update(self, chunk: Chunk) -> None:
        """Queue a chunk's row for the index: its attention, and its place on disk if it has one."""
        chunk.n_indexed_scores = chunk.n_scores
        row = ChunkRow(
            chunk.id, chunk.disk, chunk.size, chunk.bits, chunk.attention, chunk.n_scores
        )
        self.update.added[chunk.id.key] = row

    def drop_bytes(self, chunk: Chunk) -> None:
        """Discard a chunk's unusable bytes; keep a ghost while other chunks continue it.

        The index keeps the ghost, too. Otherwise a later process would not find the chunks before
        it when their context is deleted. The chunk may already be gone.
        """
        if self.tree.get(chunk.id.key) is not chunk:
            return
        if self.tree.is_leaf(chunk):
            self.drop(chunk)
            return
        ghost = Chunk(chunk.id, 0, attention=chunk.attention, n_scores=chunk.n_scores)
        self.tree.add(ghost)
        self._free_bytes(chunk)
        if self.disk is not None:
            self.queue_index_update(ghost)

    def drop(self, chunk: Chunk) -> None:
        """Remove a chunk from the tree and from both tiers.

        A pinned chunk keeps its RAM until it is unpinned. A parent that is a ghost is removed too
        once nothing continues it, so a chunk to drop may already be gone.
        """
        if self.tree.get(chunk.id.key) is not chunk:
            return
        parent = self.tree.get(chunk.id.parent)
        self.tree.remove(chunk)
        self._free_bytes(chunk)
        if parent is not None and parent.is_ghost and self.tree.is_leaf(parent):
            self.drop(parent)

    def detach_disk(self) -> None:
        """Continue without a disk tier: keep only the chunks in RAM."""
        self.disk = None
        self.dirty.clear()
        self.update = IndexUpdate()
        for chunk in list(self.tree):
            chunk.disk = ABSENT
            if chunk.ram == ABSENT:
                self.tree.remove(chunk)
                self._mark_inactive(chunk)

    # -- inside ---------------------------------------------------------------------------------

    def _mark_used(self, chunk: Chunk) -> None:
        if not chunk.used:
            self.active_bytes += page_round(chunk.size)
        chunk.used = next(self._clock)

    def _mark_inactive(self, chunk: Chunk) -> None:
        if chunk.used:
            self.active_bytes -= page_round(chunk.size)

    def _free_bytes(self, chunk: Chunk) -> None:
        self._mark_inactive(chunk)
        self.dirty.pop(chunk.id.key, None)
        if self.disk is not None:  # where the index may have a row of it, or of its ghost
            if chunk.disk != ABSENT:
                self.disk.free(chunk, chunk.disk)
                chunk.disk = ABSENT
            self.update.added.pop(chunk.id.key, None)
            self.update.used.pop(chunk.id.key, None)
            self.update.removed.append(chunk.id.key)
        if chunk.ram != ABSENT and chunk.pins == 0:
            self._free_ram(chunk)

    def _free_ram(self, chunk: Chunk) -> None:
        self.ram.free(chunk, chunk.ram)
        chunk.ram = ABSENT

    def _touch_disk(self, chunk: Chunk) -> None:
        if self.disk is not None and chunk.disk != ABSENT:
            self.disk.queue.touch(chunk)
            self.update.used.pop(chunk.id.key, None)
            self.update.used[chunk.id.key] = None

    def _evict_from_disk(self, chunk: Chunk) -> None:
        self.counters.disk_evicted += 1
        self.drop(chunk)
