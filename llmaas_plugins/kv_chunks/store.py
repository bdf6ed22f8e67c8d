"""Chunks in their tiers: claim, reclaim, load, fault (LLMS §3.1), within byte budgets.

A chunk is claimed encoded in RAM (``put``), written to disk ahead of time (``flush``), reclaimed
from RAM without any I/O because it is on disk already, and loaded back on demand (``fetch``). A
chunk that turns out damaged is a fault: it is dropped, and its tokens are evaluated again.
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
from llmaas_plugins.kv_chunks.disk import DiskStore
from llmaas_plugins.kv_chunks.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.keys import ChunkId
from llmaas_plugins.kv_chunks.queues import Eviction
from llmaas_plugins.kv_chunks.shelf import Shelf
from llmaas_plugins.kv_chunks.swapout import SwapOut
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, ChunkTree, Match

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
        """Take what ``budget`` has left for the RAM tier, and an opened disk tier or none.

        Args:
            budget: Of RAM.
            disk: The disk tier.
            eviction: Which chunks leave RAM first.
            write_budget: Bytes that may be written to disk a day.

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
        forks.watch(self)

    @property
    def tree(self) -> ChunkTree:
        """The chunks."""
        return self._shelf.tree

    @property
    def ram_capacity(self) -> int:
        """Bytes of the RAM tier."""
        return self._shelf.ram.capacity

    def set_aside(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Space in the RAM tier for transfer buffers, whole pages; None when there is none."""
        offset = self._reserve_ram(n_bytes)
        if offset is None:
            return None
        self._buffer_bytes += n_bytes
        return self._shelf.ram.view(offset, n_bytes)

    def give_back(self, area: NDArray[np.uint8]) -> None:
        """End of ``set_aside``."""
        with self._shelf.lock:
            ram = self._shelf.ram
            ram.cancel(int(area.ctypes.data) - ram.address(0), len(area))
        self._buffer_bytes -= len(area)

    def leave(self, owner: Hashable) -> None:
        """Note that ``owner`` is gone, with its working set and what it was lent.

        Called by the garbage collector, inside the store, too; so nothing is done before the next
        call that needs room.
        """
        self._gone.append(owner)

    def lendable(self, owner: Hashable) -> int:
        """Bytes of the RAM tier that no chunk of a context in use needs, nor anybody but ``owner``.

        Below 0 if these contexts do not all fit.
        """
        self._forget_gone()
        with self._shelf.lock:
            ram = self._shelf.ram
            others = ram.lent - self._shelf.lent(owner)
            return ram.capacity - self._buffer_bytes - self._shelf.active_bytes - others

    def lend(self, owner: Hashable, n_bytes: int) -> int:
        """Let ``owner`` use so much memory elsewhere, at the cost of chunks; what it may use."""
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
        """Chunks for the longest stored prefix of ``tokens``, shape ``(n,)``."""
        with self._shelf.lock:
            return self._shelf.tree.match(root, tokens)

    def touch(self, ids: Sequence[ChunkId]) -> None:
        """Mark the stored ones of a context's chunks as used, the last one first."""
        with self._shelf.lock:
            self._shelf.touch([chunk for chunk in self.known(ids) if chunk is not None])

    def missing(self, ids: Sequence[ChunkId]) -> list[int]:
        """Indices of identities whose bytes are stored nowhere."""
        found = enumerate(self.known(ids))
        return [i for i, chunk in found if chunk is None or chunk.is_ghost]

    def layout(self, root: bytes) -> str | None:
        """Layout of the cells under ``root``, as JSON, if any were ever saved."""
        if root not in self._layouts and self._swap is not None:
            found = self._swap.layout(root)
            if found is not None:
                self._layouts[root] = found
        return self._layouts.get(root)

    def set_layout(self, root: bytes, layout: str) -> None:
        """Remember the layout of the cells under ``root``."""
        self._layouts[root] = layout
        with self._shelf.lock:  # committed with the chunks that have it
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
        """Claim room for a chunk and let ``encode`` fill it.

        Args:
            wanted: Its identity.
            bound: Most bytes ``encode`` may write.
            encode: Fills the array it gets; returns the bytes it wrote.
            is_first: Whether it begins a context; any other is of no use without its parent.

        Returns:
            False when no tier has room for it or its parent; the chunk will be recomputed.
        """
        offset = self._reserve_ram(bound, wanted.parent)
        if offset is None:
            return False
        try:
            room = self._shelf.ram.view(offset, page_round(bound))
            size = encode(room[:bound])
            bits = _native.chunk_peek(room[:size]).bits
            room[size : page_round(size)] = 0  # the slab gets whole pages
        except BaseException:
            with self._shelf.lock:
                self._shelf.ram.cancel(offset, bound)
            raise
        with self._shelf.lock:
            self._shelf.ram.shrink(offset, bound, size)
            there = self._shelf.tree.get(wanted.key)
            is_stored = there is not None and not there.is_ghost  # another engine was faster
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
        """Drop what only this context needs and does not go on with: ``ids`` take its room."""
        going_on = {wanted.key for wanted in ids}
        with self._shelf.lock:
            for chunk in self._shelf.tree.of_context_alone(context_id):
                if chunk.id.key in going_on:
                    break
                self._shelf.drop(chunk)

    def set_head(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Let a named context end with the last stored one of ``ids``."""
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
        """Bring chunks into RAM and pin them; ``release`` them when done.

        Args:
            chunks: The chunks.
            is_ahead: Nobody waits for them yet.

        Returns:
            Addresses of the leading chunks that are there and sound; shorter than ``chunks`` when
            one was damaged or found no room.
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
        """Drop a chunk whose bytes turned out unusable."""
        with self._shelf.lock:
            self._shelf.counters.faults += 1
            if self._shelf.tree.get(chunk.id.key) is chunk:
                self._shelf.lose(chunk)

    # -- tolerance (LLMS §3.2), working sets (§3.4) -----------------------------------------------

    def notice(
        self, ids: Sequence[ChunkId], attention: Iterable[float], seen: Iterable[float]
    ) -> None:
        """The tokens of a context's chunks got so much more attention, in so many scores."""
        with self._shelf.lock:
            for chunk, amount, n in zip(self.known(ids), attention, seen, strict=True):
                if chunk is not None:
                    self._shelf.notice(chunk, amount, n)

    def known(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        """What is stored of a context's chunks, ghosts included."""
        with self._shelf.lock:
            return [self._shelf.tree.get(wanted.key) for wanted in ids]

    def demote(
        self, ids: Sequence[ChunkId], bits: Sequence[int], size: Callable[[int, int], int]
    ) -> None:
        """Cut chunks that have more than so many bits a value; those in use stay as they are.

        Args:
            ids: Identities.
            bits: Most bits of each.
            size: Bytes of a chunk of so many tokens at so many bits.
        """
        with self._shelf.lock:
            for chunk, most in zip(self.known(ids), bits, strict=True):
                if chunk is not None and chunk.pins == 0 and chunk.bits > most:
                    self._shelf.cut(chunk, size(chunk.n_tokens, most), most)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk | None]) -> None:
        """Let the chunks of the context that ``owner`` runs leave RAM last (LLMS §3.4)."""
        with self._shelf.lock:
            self._shelf.lock_working_set(owner, filter(None, chunks))

    # -- swap-out, eviction, end ----------------------------------------------------------------

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index. Errors are counted and logged."""
        if self._swap is not None:
            self._swap.flush()

    def compact(self) -> None:
        """Close the gaps in RAM that cut chunks left, if it is worth moving others."""
        with self._shelf.lock:
            self._shelf.ram.compact()

    def refill(self) -> None:
        """Read chunks back into RAM that has become free, the most recently used ones first.

        It ends when somebody else wants to read.
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
        """Chunks that were used, are on disk only, and fit what is free; the last used first."""
        with self._shelf.lock:
            free = self._shelf.ram.room - self._shelf.ram.used_bytes
            if free < PAGE:
                return []
            absent = [c for c in self._shelf.tree if c.used and c.ram == ABSENT != c.disk]
        absent.sort(key=lambda chunk: chunk.used, reverse=True)
        ends = itertools.accumulate(page_round(chunk.size) for chunk in absent)
        return [chunk for chunk, end in zip(absent, ends, strict=True) if end <= free]

    def _places_back(self, wanted: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """Those of the chunks that are still wanted, pinned, and free places for them."""
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
        """Forget what only this context needs, in every tier and for good; bytes freed.

        Raises:
            StoreError: The disk still has some of it; the next call or commit tries again.
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
        """Sizes and counters, as plain JSON types."""
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
        """Write what is dirty and close the files."""
        swap = self._swap
        if swap is not None:
            try:
                swap.flush()
            finally:
                self._swap = self._shelf.disk = None
                swap.close()

    # -- fork -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Let nobody change anything until ``after_fork``."""
        self._shelf.lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """A child goes on with what it has in RAM: the files and their lock are its parent's."""
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
        """Room for ``n_bytes``, without dropping ``parent``; dirty chunks go to disk first."""
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
                else:  # read by another thread, or dropped, in the meantime
                    self._shelf.ram.cancel(place, chunk.size)
        statuses = _native.store_read(
            tier.fd,
            [offset for _, _, offset in coming],
            [chunk.size for chunk, _, _ in coming],
            [self._shelf.ram.address(place) for _, place, _ in coming],
            [chunk.id.key for chunk, _, _ in coming],
            is_ahead=is_ahead,
        )
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
                    _log.warning("a stored chunk is unusable (%s); recomputing it", status.name)
                    self.fault(chunk)


def _never(_: Chunk) -> bool:
    return False
