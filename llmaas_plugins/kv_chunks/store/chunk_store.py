"""Chunks in RAM and on disk, within byte budgets: claim, reclaim, load and fault (LLMS §3.1).

``put`` claims a chunk, encoded, in RAM, and ``flush`` writes it to disk ahead of time. Reclaiming
its RAM then needs no I/O, and ``fetch`` loads it back on demand. A damaged chunk is a fault: it is
dropped, and its tokens are evaluated again.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens, forks
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.chunk_ids import ChunkId
from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, ChunkTree, PrefixMatch
from llmaas_plugins.trouble import Trouble

__all__ = ["ChunkStore"]

_log = logging.getLogger("llmaas.kv_chunks")
_REFILL_CHUNKS = 16


class ChunkStore(forks.Forked):
    """The chunks of one process. Thread-safe; I/O and codecs run outside the lock."""

    def __init__(
        self,
        budget: Budget,
        disk: DiskStore | None,
        *,
        eviction: EvictionPolicy = "lru",
        write_budget: int | None = None,
    ) -> None:
        """Give the rest of ``budget`` to the RAM tier, and take over an opened disk tier.

        Args:
            budget: Byte budget of RAM.
            disk: Disk tier, or None.
            eviction: Order in which chunks leave RAM.
            write_budget: Bytes that may be written to disk each day; None for no limit.

        Raises:
            StoreError: The index cannot be read.
        """
        try:
            self._residency = ChunkResidency(budget, None if disk is None else disk.tier, eviction)
            self._writer = (
                None if disk is None else ChunkWriter(self._residency, disk, write_budget)
            )
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self._layouts: dict[bytes, str] = {}
        self._buffer_bytes = self._n_fetches = 0
        self._closed_owners: deque[Hashable] = deque()
        self._read_trouble = Trouble(_log, logging.WARNING)
        forks.watch(self)

    @property
    def tree(self) -> ChunkTree:
        """All chunks."""
        return self._residency.tree

    @property
    def ram_capacity(self) -> int:
        """Bytes of the RAM tier."""
        return self._residency.ram.capacity

    def allocate_buffer(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Reserve RAM-tier pages for transfer buffers; return None if they do not fit."""
        offset = self._reserve_ram(n_bytes)
        if offset is None:
            return None
        self._buffer_bytes += n_bytes
        return self._residency.ram.view(offset, n_bytes)

    def free_buffer(self, area: NDArray[np.uint8]) -> None:
        """Free buffers that ``allocate_buffer`` returned."""
        with self._residency.lock:
            ram = self._residency.ram
            ram.cancel(int(area.ctypes.data) - ram.address(0), len(area))
        self._buffer_bytes -= len(area)

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
        self._remove_closed_owners()
        with self._residency.lock:
            ram = self._residency.ram
            others = ram.lent - self._residency.lent(owner)
            return ram.capacity - self._buffer_bytes - self._residency.active_bytes - others

    def lend(self, owner: Hashable, n_bytes: int) -> int:
        """Lend RAM-tier bytes to ``owner``, evicting chunks if needed; return the bytes lent."""
        self._remove_closed_owners()
        for flushed in (False, True):
            with self._residency.lock:
                is_met = self._residency.lend(owner, n_bytes)
            if is_met or flushed or not self._residency.dirty:
                break
            self.flush()
        return self._residency.lent(owner)

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Tokens) -> PrefixMatch:
        """Return the chunks of the longest stored prefix of ``tokens``, shape ``(n,)``."""
        with self._residency.lock:
            return self._residency.tree.match(root, tokens)

    def touch(self, ids: Sequence[ChunkId]) -> None:
        """Mark the stored chunks of a context as used, the last chunk first."""
        with self._residency.lock:
            self._residency.touch([chunk for chunk in self.find(ids) if chunk is not None])

    def missing(self, ids: Sequence[ChunkId]) -> list[int]:
        """Return the indices of the identities whose bytes are stored nowhere."""
        found = enumerate(self.find(ids))
        return [i for i, chunk in found if chunk is None or chunk.is_ghost]

    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root``, as JSON, or None if none was saved."""
        if root not in self._layouts and self._writer is not None:
            found = self._writer.layout(root)
            if found is not None:
                self._layouts[root] = found
        return self._layouts.get(root)

    def set_layout(self, root: bytes, layout: str) -> None:
        """Store the layout of the cells under ``root``."""
        self._layouts[root] = layout
        with self._residency.lock:  # committed together with the chunks that use it
            self._residency.update.layouts[root] = layout

    # -- claim ----------------------------------------------------------------------------------

    def put(
        self,
        wanted: ChunkId,
        bound: int,
        encode: Callable[[NDArray[np.uint8]], int],
        *,
        is_first: bool,
    ) -> bool:
        """Claim space for a chunk and let ``encode`` fill it.

        Args:
            wanted: Identity of the chunk.
            bound: Most bytes that ``encode`` may write.
            encode: Function that fills the given array and returns the number of bytes written.
            is_first: Whether the chunk begins a context; any other chunk needs its parent.

        Returns:
            False if there is no space for the chunk or its parent is missing; the chunk will be
            recomputed.
        """
        offset = self._reserve_ram(bound, wanted.parent)
        if offset is None:
            return False
        try:
            room = self._residency.ram.view(offset, page_round(bound))
            size = encode(room[:bound])
            bits = _native.chunk_peek(room[:size]).bits
            room[size : page_round(size)] = 0  # whole pages are written to the slab
        except BaseException:
            with self._residency.lock:
                self._residency.ram.cancel(offset, bound)
            raise
        with self._residency.lock:
            self._residency.ram.shrink(offset, bound, size)
            there = self._residency.tree.get(wanted.key)
            is_stored = there is not None and not there.is_ghost  # another engine stored it first
            if is_stored or not (is_first or self._residency.tree.get(wanted.parent)):
                self._residency.ram.cancel(offset, size)
                return is_stored
            chunk = Chunk(wanted, size, bits, ram=offset)
            if there is not None:
                chunk.attention, chunk.n_scores = there.attention, there.n_scores
            self._residency.add(chunk)
            for old in self._residency.tree.superseded_by(wanted):
                self._residency.drop(old)
            self._residency.counters.claimed_chunks += 1
            self._residency.counters.claimed_bytes += size
        return True

    def drop_replaced_tail(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Drop the chunks that only this context needs and that are not in ``ids``."""
        going_on = {wanted.key for wanted in ids}
        with self._residency.lock:
            for chunk in self._residency.tree.chunks_only_in(context_id):
                if chunk.id.key in going_on:
                    break
                self._residency.drop(chunk)

    def set_head(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Let a named context end with the last of the leading stored chunks of ``ids``."""
        with self._residency.lock:
            found = itertools.takewhile(bool, self.find(ids))
            whole = [chunk for chunk in found if chunk is not None]
            if not whole:
                return
            old = self._residency.tree.set_head(context_id, whole[-1].id.key)
            if old is not None and old not in whole:
                for chunk in list(self._residency.tree.removable_from(old)):
                    self._residency.drop(chunk)
            self._residency.update.heads = self._residency.tree.contexts()

    # -- load -----------------------------------------------------------------------------------

    def fetch(self, chunks: Sequence[Chunk], *, is_ahead: bool = False) -> list[int]:
        """Bring chunks into RAM and pin them until ``release``.

        Args:
            chunks: Chunks to fetch.
            is_ahead: True if no request waits for them yet.

        Returns:
            Addresses of the leading chunks that are in RAM and valid; fewer than ``chunks`` if one
            was damaged or did not fit.
        """
        wanted: list[Chunk] = []
        self._n_fetches += 1
        with self._residency.lock:
            for chunk in chunks:
                if self._residency.tree.get(chunk.id.key) is not chunk or chunk.is_ghost:
                    break
                chunk.pins += 1
                wanted.append(chunk)
            absent = [chunk for chunk in wanted if chunk.ram == ABSENT]
            self._residency.counters.ram_hits += len(wanted) - len(absent)
        places = self._reserve_for(absent)
        self._read(absent[: len(places)], places, is_ahead=is_ahead)
        with self._residency.lock:
            n_ready = next((i for i, c in enumerate(wanted) if c.ram == ABSENT), len(wanted))
            self._residency.unpin(wanted[n_ready:])
            return [self._residency.ram.address(chunk.ram) for chunk in wanted[:n_ready]]

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Unpin chunks that ``fetch`` returned."""
        with self._residency.lock:
            self._residency.unpin(chunks)

    def drop_damaged(self, chunk: Chunk) -> None:
        """Drop a chunk whose bytes are unusable."""
        with self._residency.lock:
            self._residency.counters.faults += 1
            if self._residency.tree.get(chunk.id.key) is chunk:
                self._residency.drop_bytes(chunk)

    # -- tolerance (LLMS §3.2), working sets (§3.4) -----------------------------------------------

    def add_attention(
        self, ids: Sequence[ChunkId], attention: Iterable[float], n_scores: Iterable[float]
    ) -> None:
        """Add attention and score counts to the stored chunks of a context."""
        with self._residency.lock:
            for chunk, amount, n in zip(self.find(ids), attention, n_scores, strict=True):
                if chunk is not None:
                    self._residency.add_attention(chunk, amount, n)

    def find(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        """Return the stored chunk, possibly a ghost, or None for each identity."""
        with self._residency.lock:
            return [self._residency.tree.get(wanted.key) for wanted in ids]

    def reduce_bits(
        self, ids: Sequence[ChunkId], bits: Sequence[int], size: Callable[[int, int], int]
    ) -> None:
        """Shorten chunks to at most the given bits per value; skip chunks that are in use.

        Args:
            ids: Identities of the chunks.
            bits: Most bits per value of each chunk.
            size: Function from tokens and bits to the bytes of a chunk.
        """
        with self._residency.lock:
            for chunk, most in zip(self.find(ids), bits, strict=True):
                if chunk is not None and chunk.pins == 0 and chunk.bits > most:
                    self._residency.truncate(chunk, size(chunk.n_tokens, most), most)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk | None]) -> None:
        """Set the chunks of the context that ``owner`` runs, which leave RAM last (LLMS §3.4)."""
        with self._residency.lock:
            self._residency.lock_working_set(owner, filter(None, chunks))

    # -- writer-out, eviction, end ----------------------------------------------------------------

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index; count and log errors."""
        if self._writer is not None:
            self._writer.flush()

    def compact(self) -> None:
        """Close the gaps that shortened chunks left in RAM, if moving chunks is worthwhile."""
        with self._residency.lock:
            self._residency.ram.compact()

    def refill(self) -> None:
        """Read chunks back into free RAM, the most recently used ones first.

        Stop as soon as another thread calls ``fetch``.
        """
        n_fetches, wanted = self._n_fetches, self._wanted_back()
        for i in range(0, len(wanted), _REFILL_CHUNKS):
            chunks, places = self._places_back(wanted[i : i + _REFILL_CHUNKS])
            self._read(chunks, places, is_ahead=True, are_oldest=True)
            with self._residency.lock:
                n_back = sum(chunk.ram != ABSENT for chunk in chunks)
                self._residency.counters.refilled_chunks += n_back
                self._residency.unpin(chunks)
            if self._n_fetches != n_fetches:
                return

    def _wanted_back(self) -> list[Chunk]:
        """Return used chunks that are only on disk and fit into free RAM, last used first."""
        with self._residency.lock:
            free = self._residency.ram.usable_bytes - self._residency.ram.used_bytes
            if free < PAGE:
                return []
            absent = [c for c in self._residency.tree if c.used and c.ram == ABSENT != c.disk]
        absent.sort(key=lambda chunk: chunk.used, reverse=True)
        ends = itertools.accumulate(page_round(chunk.size) for chunk in absent)
        return [chunk for chunk, end in zip(absent, ends, strict=True) if end <= free]

    def _places_back(self, wanted: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """Pin the chunks that are still only on disk; return them and free places for them."""
        chunks: list[Chunk] = []
        places: list[int] = []
        with self._residency.lock:
            for chunk in wanted:
                if chunk.ram != ABSENT or chunk.disk == ABSENT:
                    continue
                place = self._residency.ram.reserve(
                    chunk.size, _never, self._residency.evict_from_ram
                )
                if place is None:
                    break
                chunk.pins += 1
                chunks.append(chunk)
                places.append(place)
        return chunks, places

    def evict_context(self, context_id: str) -> int:
        """Delete for good what only this context needs, in every tier; return the bytes freed.

        Raises:
            StoreError: Some of it is still on disk; the next call or commit tries again.
        """
        freed, residency = 0, self._residency
        with residency.lock:
            for chunk in residency.tree.forget_context(context_id):
                freed += chunk.size
                residency.drop(chunk)
            residency.update.heads = residency.tree.contexts()
        if self._writer is not None:
            self._writer.erase_freed()
        return freed

    def stats(self) -> dict[str, object]:
        """Return sizes and counters as JSON types."""
        self._remove_closed_owners()
        with self._residency.lock:
            tree, ram, disk = self._residency.tree, self._residency.ram, self._residency.disk
            levels = Counter(chunk.bits for chunk in tree if chunk.bits)
            return {
                "chunks": len(tree),
                "levels": {str(bits): n for bits, n in sorted(levels.items(), reverse=True)},
                "contexts": len(tree.contexts()),
                "ram_bytes": ram.used_bytes - self._buffer_bytes,
                "buffer_bytes": self._buffer_bytes,
                "lent_bytes": ram.lent,
                "ram_budget_bytes": ram.capacity,
                "disk_bytes": 0 if disk is None else disk.used_bytes,
                "disk_budget_bytes": 0 if disk is None else disk.capacity,
                "store": None if self._writer is None else str(self._writer.directory),
                **self._residency.counters.snapshot(),
            }

    def close(self) -> None:
        """Write dirty chunks and close the files."""
        writer = self._writer
        if writer is not None:
            try:
                writer.flush()
            finally:
                self._writer = self._residency.disk = None
                writer.close()

    # -- fork -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Lock the store until ``after_fork``."""
        self._residency.lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Unlock the store; in a child, continue with RAM alone, as the files are the parent's."""
        if in_child and self._writer is not None:
            self._writer.abandon()
            self._writer = None
            self._residency.detach_disk()
        self._residency.lock.release()

    # -- inside ---------------------------------------------------------------------------------

    def _remove_closed_owners(self) -> None:
        while self._closed_owners:
            with self._residency.lock:
                self._residency.remove_owner(self._closed_owners.popleft())

    def _reserve_ram(self, n_bytes: int, parent: bytes | None = None) -> int | None:
        """Reserve RAM without dropping ``parent``; write dirty chunks to disk first if needed."""
        self._remove_closed_owners()
        for flushed in (False, True):
            with self._residency.lock:
                offset = self._residency.reserve_ram(n_bytes, parent)
            if offset is not None or flushed or not self._residency.dirty:
                break
            self.flush()
        if offset is None:
            with self._residency.lock:
                offset = self._residency.reserve_ram_by_loss(n_bytes, parent)
        if offset is None:
            self._residency.counters.no_room += 1
        return offset

    def _reserve_for(self, chunks: Sequence[Chunk]) -> list[int]:
        places: list[int] = []
        for chunk in chunks:
            offset = self._reserve_ram(chunk.size)
            if offset is None:
                break
            places.append(offset)
        return places

    def _read(
        self,
        chunks: Sequence[Chunk],
        places: Sequence[int],
        *,
        is_ahead: bool,
        are_oldest: bool = False,
    ) -> None:
        tier = self._residency.disk
        if tier is None or not chunks:
            return
        coming: list[tuple[Chunk, int, int]] = []
        with self._residency.lock:
            for chunk, place in zip(chunks, places, strict=True):
                if chunk.ram == ABSENT and chunk.disk != ABSENT:
                    coming.append((chunk, place, tier.file_offset(chunk.disk)))
                else:  # another thread read or dropped it meanwhile
                    self._residency.ram.cancel(place, chunk.size)
        statuses = _native.store_read(
            tier.fd,
            [offset for _, _, offset in coming],
            [chunk.size for chunk, _, _ in coming],
            [self._residency.ram.address(place) for _, place, _ in coming],
            [chunk.id.key for chunk, _, _ in coming],
            is_ahead=is_ahead,
        )
        unusable: list[str] = []
        with self._residency.lock:
            for (chunk, place, _), status in zip(coming, statuses, strict=True):
                if status == _native.Status.OK and chunk.ram == ABSENT:
                    chunk.ram = place
                    self._residency.ram.queue.add(chunk, is_oldest=are_oldest)
                    self._residency.counters.disk_hits += 1
                    self._residency.counters.read_bytes += chunk.size
                    continue
                self._residency.ram.cancel(place, chunk.size)
                if status != _native.Status.OK and self._residency.tree.get(chunk.id.key) is chunk:
                    unusable.append(status.name)
                    self.drop_damaged(chunk)
            if unusable:
                found = unusable[0]
                self._read_trouble.failed("a stored chunk is unusable (%s); recomputing it", found)
            elif coming:
                self._read_trouble.worked()


def _never(_: Chunk) -> bool:
    return False
