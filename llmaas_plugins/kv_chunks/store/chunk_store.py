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
from llmaas_plugins.kv_chunks.store.chunk_writer import SwapOut
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.eviction import Eviction
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.residency import Shelf
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, ChunkTree, Match
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
        eviction: Eviction = "lru",
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
            self._shelf = Shelf(budget, None if disk is None else disk.tier, eviction)
            self._swap = None if disk is None else SwapOut(self._shelf, disk, write_budget)
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self._layouts: dict[bytes, str] = {}
        self._buffer_bytes = self._n_fetches = 0
        self._gone: deque[Hashable] = deque()
        self._reading = Trouble(_log, logging.WARNING)
        forks.watch(self)

    @property
    def tree(self) -> ChunkTree:
        """All chunks."""
        return self._shelf.tree

    @property
    def ram_capacity(self) -> int:
        """Bytes of the RAM tier."""
        return self._shelf.ram.capacity

    def set_aside(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Reserve RAM-tier pages for transfer buffers; return None if they do not fit."""
        offset = self._reserve_ram(n_bytes)
        if offset is None:
            return None
        self._buffer_bytes += n_bytes
        return self._shelf.ram.view(offset, n_bytes)

    def give_back(self, area: NDArray[np.uint8]) -> None:
        """Free buffers that ``set_aside`` returned."""
        with self._shelf.lock:
            ram = self._shelf.ram
            ram.cancel(int(area.ctypes.data) - ram.address(0), len(area))
        self._buffer_bytes -= len(area)

    def leave(self, owner: Hashable) -> None:
        """Note that ``owner`` is gone, so that its working set and its loan can be dropped.

        The garbage collector calls this at any time, even inside the store. The work is therefore
        left to the next call that needs space.
        """
        self._gone.append(owner)

    def lendable(self, owner: Hashable) -> int:
        """Return the RAM-tier bytes that neither contexts in use nor other owners need.

        The result is negative if the contexts in use do not all fit.
        """
        self._forget_gone()
        with self._shelf.lock:
            ram = self._shelf.ram
            others = ram.lent - self._shelf.lent(owner)
            return ram.capacity - self._buffer_bytes - self._shelf.active_bytes - others

    def lend(self, owner: Hashable, n_bytes: int) -> int:
        """Lend RAM-tier bytes to ``owner``, evicting chunks if needed; return the bytes lent."""
        self._forget_gone()
        for flushed in (False, True):
            with self._shelf.lock:
                is_met = self._shelf.lend(owner, n_bytes)
            if is_met or flushed or not self._shelf.dirty:
                break
            self.flush()
        return self._shelf.lent(owner)

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Tokens) -> Match:
        """Return the chunks of the longest stored prefix of ``tokens``, shape ``(n,)``."""
        with self._shelf.lock:
            return self._shelf.tree.match(root, tokens)

    def touch(self, ids: Sequence[ChunkId]) -> None:
        """Mark the stored chunks of a context as used, the last chunk first."""
        with self._shelf.lock:
            self._shelf.touch([chunk for chunk in self.known(ids) if chunk is not None])

    def missing(self, ids: Sequence[ChunkId]) -> list[int]:
        """Return the indices of the identities whose bytes are stored nowhere."""
        found = enumerate(self.known(ids))
        return [i for i, chunk in found if chunk is None or chunk.is_ghost]

    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root``, as JSON, or None if none was saved."""
        if root not in self._layouts and self._swap is not None:
            found = self._swap.layout(root)
            if found is not None:
                self._layouts[root] = found
        return self._layouts.get(root)

    def set_layout(self, root: bytes, layout: str) -> None:
        """Store the layout of the cells under ``root``."""
        self._layouts[root] = layout
        with self._shelf.lock:  # committed together with the chunks that use it
            self._shelf.update.layouts[root] = layout

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
            room = self._shelf.ram.view(offset, page_round(bound))
            size = encode(room[:bound])
            bits = _native.chunk_peek(room[:size]).bits
            room[size : page_round(size)] = 0  # whole pages are written to the slab
        except BaseException:
            with self._shelf.lock:
                self._shelf.ram.cancel(offset, bound)
            raise
        with self._shelf.lock:
            self._shelf.ram.shrink(offset, bound, size)
            there = self._shelf.tree.get(wanted.key)
            is_stored = there is not None and not there.is_ghost  # another engine stored it first
            if is_stored or not (is_first or self._shelf.tree.get(wanted.parent)):
                self._shelf.ram.cancel(offset, size)
                return is_stored
            chunk = Chunk(wanted, size, bits, ram=offset)
            if there is not None:
                chunk.attention, chunk.seen = there.attention, there.seen
            self._shelf.enter(chunk)
            for old in self._shelf.tree.superseded_by(wanted):
                self._shelf.drop(old)
            self._shelf.counters.claimed_chunks += 1
            self._shelf.counters.claimed_bytes += size
        return True

    def leave_behind(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Drop the chunks that only this context needs and that are not in ``ids``."""
        going_on = {wanted.key for wanted in ids}
        with self._shelf.lock:
            for chunk in self._shelf.tree.of_context_alone(context_id):
                if chunk.id.key in going_on:
                    break
                self._shelf.drop(chunk)

    def set_head(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Let a named context end with the last of the leading stored chunks of ``ids``."""
        with self._shelf.lock:
            found = itertools.takewhile(bool, self.known(ids))
            whole = [chunk for chunk in found if chunk is not None]
            if not whole:
                return
            old = self._shelf.tree.set_head(context_id, whole[-1].id.key)
            if old is not None and old not in whole:
                for chunk in list(self._shelf.tree.unneeded_from(old)):
                    self._shelf.drop(chunk)
            self._shelf.update.heads = self._shelf.tree.contexts()

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
        with self._shelf.lock:
            for chunk in chunks:
                if self._shelf.tree.get(chunk.id.key) is not chunk or chunk.is_ghost:
                    break
                chunk.pins += 1
                wanted.append(chunk)
            absent = [chunk for chunk in wanted if chunk.ram == ABSENT]
            self._shelf.counters.ram_hits += len(wanted) - len(absent)
        places = self._reserve_for(absent)
        self._read(absent[: len(places)], places, is_ahead=is_ahead)
        with self._shelf.lock:
            n_ready = next((i for i, c in enumerate(wanted) if c.ram == ABSENT), len(wanted))
            self._shelf.unpin(wanted[n_ready:])
            return [self._shelf.ram.address(chunk.ram) for chunk in wanted[:n_ready]]

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Unpin chunks that ``fetch`` returned."""
        with self._shelf.lock:
            self._shelf.unpin(chunks)

    def fault(self, chunk: Chunk) -> None:
        """Drop a chunk whose bytes are unusable."""
        with self._shelf.lock:
            self._shelf.counters.faults += 1
            if self._shelf.tree.get(chunk.id.key) is chunk:
                self._shelf.lose(chunk)

    # -- tolerance (LLMS §3.2), working sets (§3.4) -----------------------------------------------

    def notice(
        self, ids: Sequence[ChunkId], attention: Iterable[float], seen: Iterable[float]
    ) -> None:
        """Add attention and score counts to the stored chunks of a context."""
        with self._shelf.lock:
            for chunk, amount, n in zip(self.known(ids), attention, seen, strict=True):
                if chunk is not None:
                    self._shelf.notice(chunk, amount, n)

    def known(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        """Return the stored chunk, possibly a ghost, or None for each identity."""
        with self._shelf.lock:
            return [self._shelf.tree.get(wanted.key) for wanted in ids]

    def demote(
        self, ids: Sequence[ChunkId], bits: Sequence[int], size: Callable[[int, int], int]
    ) -> None:
        """Shorten chunks to at most the given bits per value; skip chunks that are in use.

        Args:
            ids: Identities of the chunks.
            bits: Most bits per value of each chunk.
            size: Function from tokens and bits to the bytes of a chunk.
        """
        with self._shelf.lock:
            for chunk, most in zip(self.known(ids), bits, strict=True):
                if chunk is not None and chunk.pins == 0 and chunk.bits > most:
                    self._shelf.cut(chunk, size(chunk.n_tokens, most), most)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk | None]) -> None:
        """Set the chunks of the context that ``owner`` runs, which leave RAM last (LLMS §3.4)."""
        with self._shelf.lock:
            self._shelf.lock_working_set(owner, filter(None, chunks))

    # -- swap-out, eviction, end ----------------------------------------------------------------

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index; count and log errors."""
        if self._swap is not None:
            self._swap.flush()

    def compact(self) -> None:
        """Close the gaps that shortened chunks left in RAM, if moving chunks is worthwhile."""
        with self._shelf.lock:
            self._shelf.ram.compact()

    def refill(self) -> None:
        """Read chunks back into free RAM, the most recently used ones first.

        Stop as soon as another thread calls ``fetch``.
        """
        n_fetches, wanted = self._n_fetches, self._wanted_back()
        for i in range(0, len(wanted), _REFILL_CHUNKS):
            chunks, places = self._places_back(wanted[i : i + _REFILL_CHUNKS])
            self._read(chunks, places, is_ahead=True, are_oldest=True)
            with self._shelf.lock:
                n_back = sum(chunk.ram != ABSENT for chunk in chunks)
                self._shelf.counters.refilled_chunks += n_back
                self._shelf.unpin(chunks)
            if self._n_fetches != n_fetches:
                return

    def _wanted_back(self) -> list[Chunk]:
        """Return used chunks that are only on disk and fit into free RAM, last used first."""
        with self._shelf.lock:
            free = self._shelf.ram.room - self._shelf.ram.used_bytes
            if free < PAGE:
                return []
            absent = [c for c in self._shelf.tree if c.used and c.ram == ABSENT != c.disk]
        absent.sort(key=lambda chunk: chunk.used, reverse=True)
        ends = itertools.accumulate(page_round(chunk.size) for chunk in absent)
        return [chunk for chunk, end in zip(absent, ends, strict=True) if end <= free]

    def _places_back(self, wanted: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """Pin the chunks that are still only on disk; return them and free places for them."""
        chunks: list[Chunk] = []
        places: list[int] = []
        with self._shelf.lock:
            for chunk in wanted:
                if chunk.ram != ABSENT or chunk.disk == ABSENT:
                    continue
                place = self._shelf.ram.reserve(chunk.size, _never, self._shelf.reclaim)
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
        freed, shelf = 0, self._shelf
        with shelf.lock:
            for chunk in shelf.tree.forget_context(context_id):
                freed += chunk.size
                shelf.drop(chunk)
            shelf.update.heads = shelf.tree.contexts()
        if self._swap is not None:
            self._swap.erase_freed()
        return freed

    def stats(self) -> dict[str, object]:
        """Return sizes and counters as JSON types."""
        self._forget_gone()
        with self._shelf.lock:
            tree, ram, disk = self._shelf.tree, self._shelf.ram, self._shelf.disk
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
                "store": None if self._swap is None else str(self._swap.directory),
                **self._shelf.counters.snapshot(),
            }

    def close(self) -> None:
        """Write dirty chunks and close the files."""
        swap = self._swap
        if swap is not None:
            try:
                swap.flush()
            finally:
                self._swap = self._shelf.disk = None
                swap.close()

    # -- fork -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Lock the store until ``after_fork``."""
        self._shelf.lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Unlock the store; in a child, continue with RAM alone, as the files are the parent's."""
        if in_child and self._swap is not None:
            self._swap.abandon()
            self._swap = None
            self._shelf.leave_disk()
        self._shelf.lock.release()

    # -- inside ---------------------------------------------------------------------------------

    def _forget_gone(self) -> None:
        while self._gone:
            with self._shelf.lock:
                self._shelf.forget(self._gone.popleft())

    def _reserve_ram(self, n_bytes: int, parent: bytes | None = None) -> int | None:
        """Reserve RAM without dropping ``parent``; write dirty chunks to disk first if needed."""
        self._forget_gone()
        for flushed in (False, True):
            with self._shelf.lock:
                offset = self._shelf.reserve_ram(n_bytes, parent)
            if offset is not None or flushed or not self._shelf.dirty:
                break
            self.flush()
        if offset is None:
            with self._shelf.lock:
                offset = self._shelf.reserve_unwritten(n_bytes, parent)
        if offset is None:
            self._shelf.counters.no_room += 1
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
        tier = self._shelf.disk
        if tier is None or not chunks:
            return
        coming: list[tuple[Chunk, int, int]] = []
        with self._shelf.lock:
            for chunk, place in zip(chunks, places, strict=True):
                if chunk.ram == ABSENT and chunk.disk != ABSENT:
                    coming.append((chunk, place, tier.file_offset(chunk.disk)))
                else:  # another thread read or dropped it meanwhile
                    self._shelf.ram.cancel(place, chunk.size)
        statuses = _native.store_read(
            tier.fd,
            [offset for _, _, offset in coming],
            [chunk.size for chunk, _, _ in coming],
            [self._shelf.ram.address(place) for _, place, _ in coming],
            [chunk.id.key for chunk, _, _ in coming],
            is_ahead=is_ahead,
        )
        unusable: list[str] = []
        with self._shelf.lock:
            for (chunk, place, _), status in zip(coming, statuses, strict=True):
                if status == _native.Status.OK and chunk.ram == ABSENT:
                    chunk.ram = place
                    self._shelf.ram.queue.enter(chunk, is_oldest=are_oldest)
                    self._shelf.counters.disk_hits += 1
                    self._shelf.counters.read_bytes += chunk.size
                    continue
                self._shelf.ram.cancel(place, chunk.size)
                if status != _native.Status.OK and self._shelf.tree.get(chunk.id.key) is chunk:
                    unusable.append(status.name)
                    self.fault(chunk)
            if unusable:
                found = unusable[0]
                self._reading.failed("a stored chunk is unusable (%s); recomputing it", found)
            elif coming:
                self._reading.worked()


def _never(_: Chunk) -> bool:
    return False
