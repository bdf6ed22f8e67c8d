"""Chunks in their tiers: claim, reclaim, load, fault (LLMS §3.1), within byte budgets.

A chunk is claimed encoded in RAM (``put``), written to disk ahead of time (``flush``), reclaimed
from RAM without any I/O because it is on disk already, and loaded back on demand (``fetch``). A
chunk that turns out damaged is a fault: it is dropped, and its tokens are evaluated again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError, Tokens
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.disk import DiskStore
from llmaas_plugins.kv_chunks.extents import page_round
from llmaas_plugins.kv_chunks.index import ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.keys import ChunkId
from llmaas_plugins.kv_chunks.tiers import RamTier
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk, ChunkTree, Match

__all__ = ["ChunkStore", "Counters"]

_log = logging.getLogger("llmaas.kv_chunks")
_FLUSH_CHUNKS = 64


@dataclass(slots=True)
class Counters:
    """What happened since the store was opened."""

    claimed_chunks: int = 0
    claimed_bytes: int = 0
    ram_hits: int = 0
    disk_hits: int = 0
    faults: int = 0
    ram_reclaimed: int = 0
    disk_evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    no_room: int = 0
    io_errors: int = 0

    def snapshot(self) -> dict[str, int]:
        """Values by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class ChunkStore:
    """The chunks of one process. Thread-safe; I/O and codecs run outside the lock."""

    def __init__(self, budget: Budget, disk: DiskStore | None) -> None:
        """Take what ``budget`` has left for the RAM tier, and an opened disk tier or none."""
        self.tree = ChunkTree()
        self.counters = Counters()
        self._ram = RamTier(budget)
        self._disk = disk
        self._lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._index_lock = threading.Lock()
        self._dirty: dict[bytes, Chunk] = {}
        self._update = IndexUpdate()
        if disk is not None:
            self.counters.faults += disk.load(self.tree)

    @property
    def ram_capacity(self) -> int:
        """Bytes of the RAM tier."""
        return self._ram.capacity

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Tokens) -> Match:
        """Chunks for the longest stored prefix of ``tokens``, shape ``(n,)``."""
        with self._lock:
            return self.tree.match(root, tokens)

    def touch(self, ids: Sequence[ChunkId]) -> None:
        """Mark the stored ones of a context's chunks as used, the last one first."""
        with self._lock:
            found = [self.tree.get(wanted.key) for wanted in ids]
            self._touch([chunk for chunk in found if chunk is not None])

    def missing(self, ids: Sequence[ChunkId]) -> list[int]:
        """Indices of identities that are stored nowhere."""
        with self._lock:
            return [i for i, wanted in enumerate(ids) if self.tree.get(wanted.key) is None]

    def geometry(self, root: bytes) -> str | None:
        """Layout of the cells under ``root``, as JSON, if a run before this one saved any."""
        with self._index_lock:
            return None if self._disk is None else self._disk.index.geometry(root)

    def set_geometry(self, root: bytes, layout: str) -> None:
        """Remember the layout of the cells under ``root``."""
        with self._index_lock:
            if self._disk is not None:
                self._disk.index.set_geometry(root, layout)

    # -- claim ----------------------------------------------------------------------------------

    def put(self, wanted: ChunkId, bound: int, encode: Callable[[NDArray[np.uint8]], int]) -> bool:
        """Claim room for a chunk and let ``encode`` fill it.

        Args:
            wanted: Its identity.
            bound: Most bytes ``encode`` may write.
            encode: Fills the array it gets; returns the bytes it wrote.

        Returns:
            False when no tier has room; the chunk will be recomputed.
        """
        offset = self._reserve_ram(bound)
        if offset is None:
            return False
        try:
            room = self._ram.view(offset, page_round(bound))
            size = encode(room[:bound])
            room[size : page_round(size)] = 0  # the slab gets whole pages
        except BaseException:
            with self._lock:
                self._ram.cancel(offset, bound)
            raise
        with self._lock:
            self._ram.shrink(offset, bound, size)
            chunk = Chunk(wanted, size, ram=offset)
            if self.tree.get(wanted.key) is not None:  # another engine was faster
                self._ram.cancel(offset, size)
                return True
            self.tree.add(chunk)
            self._ram.enter(chunk)
            if self._disk is not None:
                self._dirty[wanted.key] = chunk
            for old in self.tree.superseded_by(wanted):
                self._drop(old)
            self.counters.claimed_chunks += 1
            self.counters.claimed_bytes += size
        return True

    def set_head(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Let a named context end with the last stored one of ``ids``."""
        with self._lock:
            found = itertools.takewhile(bool, (self.tree.get(wanted.key) for wanted in ids))
            whole = [chunk for chunk in found if chunk is not None]
            if not whole:
                return
            old = self.tree.set_head(context_id, whole[-1].id.key)
            if old is not None and old not in whole:
                for chunk in list(self.tree.unneeded_from(old)):
                    self._drop(chunk)
            self._update.heads = self.tree.contexts()

    # -- load -----------------------------------------------------------------------------------

    def fetch(self, chunks: Sequence[Chunk]) -> list[int]:
        """Bring chunks into RAM and pin them; ``release`` them when done.

        Returns:
            Addresses of the leading chunks that are there and sound; shorter than ``chunks`` when
            one was damaged or found no room.
        """
        wanted: list[Chunk] = []
        with self._lock:
            for chunk in chunks:
                if self.tree.get(chunk.id.key) is not chunk:
                    break
                chunk.pins += 1
                wanted.append(chunk)
            absent = [chunk for chunk in wanted if chunk.ram == ABSENT]
            self.counters.ram_hits += len(wanted) - len(absent)
        places = self._reserve_for(absent)
        self._read(absent[: len(places)], places)
        with self._lock:
            n_ready = next((i for i, c in enumerate(wanted) if c.ram == ABSENT), len(wanted))
            self._unpin(wanted[n_ready:])
            return [self._ram.address(chunk.ram) for chunk in wanted[:n_ready]]

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Unpin chunks that ``fetch`` returned."""
        with self._lock:
            self._unpin(chunks)

    def fault(self, chunk: Chunk) -> None:
        """Drop a chunk whose bytes turned out unusable."""
        with self._lock:
            self.counters.faults += 1
            if self.tree.get(chunk.id.key) is chunk:
                self._drop(chunk)

    # -- swap-out, eviction, end ----------------------------------------------------------------

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index. Errors are counted and logged."""
        if self._disk is None:
            return
        with self._flush_lock:
            written: list[Chunk] = []
            while self._dirty:
                batch, places = self._next_batch()
                written += self._write(batch, places)
            with self._lock:
                self._touch([chunk for chunk in written if chunk.disk != ABSENT])
            self._commit()

    def evict_context(self, context_id: str) -> int:
        """Forget what only this context needs, in every tier; bytes freed."""
        freed = 0
        with self._lock:
            for chunk in self.tree.forget_context(context_id):
                freed += chunk.size
                self._drop(chunk)
            self._update.heads = self.tree.contexts()
        self._commit()
        return freed

    def stats(self) -> dict[str, object]:
        """Sizes and counters, as plain JSON types."""
        with self._lock:
            disk = self._disk
            return {
                "chunks": len(self.tree),
                "contexts": len(self.tree.contexts()),
                "ram_bytes": self._ram.used_bytes,
                "ram_budget_bytes": self._ram.capacity,
                "disk_bytes": 0 if disk is None else disk.tier.used_bytes,
                "disk_budget_bytes": 0 if disk is None else disk.tier.capacity,
                "store": None if disk is None else str(disk.directory),
                **self.counters.snapshot(),
            }

    def close(self) -> None:
        """Write what is dirty and close the files."""
        self.flush()
        with self._index_lock, self._lock:
            if self._disk is not None:
                self._disk.close()
                self._disk = None

    # -- inside ---------------------------------------------------------------------------------

    def _touch(self, path: Sequence[Chunk]) -> None:
        for chunk in reversed(path):
            self._ram.touch(chunk)
            if self._disk is not None:
                self._disk.tier.touch(chunk)
                if chunk.disk != ABSENT:
                    self._update.used.pop(chunk.id.key, None)
                    self._update.used[chunk.id.key] = None

    def _reserve_ram(self, n_bytes: int) -> int | None:
        """Room for ``n_bytes``; dirty chunks go to disk first if they are in the way."""

        def evictable(chunk: Chunk) -> bool:
            return chunk.pins == 0 and (self._disk is None or chunk.disk != ABSENT)

        for flushed in (False, True):
            with self._lock:
                offset = self._ram.reserve(n_bytes, evictable, self._reclaim)
            if offset is not None or flushed or not self._dirty:
                break
            self.flush()
        if offset is None:
            self.counters.no_room += 1
        return offset

    def _reserve_for(self, chunks: Sequence[Chunk]) -> list[int]:
        places: list[int] = []
        for chunk in chunks:
            offset = self._reserve_ram(chunk.size)
            if offset is None:
                break
            places.append(offset)
        return places

    def _reclaim(self, chunk: Chunk) -> None:
        if chunk.disk == ABSENT:
            self._drop(chunk)
        else:
            self._ram.free(chunk, chunk.ram)
            chunk.ram = ABSENT
        self.counters.ram_reclaimed += 1

    def _drop(self, chunk: Chunk) -> None:
        """Take a chunk out of the tree and of both tiers. A pinned one keeps its RAM until then."""
        self.tree.remove(chunk)
        self._dirty.pop(chunk.id.key, None)
        if chunk.disk != ABSENT and self._disk is not None:
            self._disk.tier.free(chunk, chunk.disk)
            self._update.added.pop(chunk.id.key, None)
            self._update.used.pop(chunk.id.key, None)
            self._update.removed.append(chunk.id.key)
            chunk.disk = ABSENT
        if chunk.ram != ABSENT and chunk.pins == 0:
            self._ram.free(chunk, chunk.ram)
            chunk.ram = ABSENT

    def _unpin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.pins -= 1
            gone = self.tree.get(chunk.id.key) is not chunk
            if gone and chunk.pins == 0 and chunk.ram != ABSENT:
                self._ram.free(chunk, chunk.ram)
                chunk.ram = ABSENT

    def _read(self, chunks: Sequence[Chunk], places: Sequence[int]) -> None:
        if not chunks or self._disk is None:
            return
        tier = self._disk.tier
        statuses = _native.store_read(
            tier.fd,
            [tier.file_offset(chunk.disk) for chunk in chunks],
            [chunk.size for chunk in chunks],
            [self._ram.address(place) for place in places],
            [chunk.id.key for chunk in chunks],
        )
        with self._lock:
            for chunk, place, status in zip(chunks, places, statuses, strict=True):
                if status == _native.Status.OK and chunk.ram == ABSENT:
                    chunk.ram = place
                    self._ram.enter(chunk)
                    self.counters.disk_hits += 1
                    self.counters.read_bytes += chunk.size
                    continue
                self._ram.cancel(place, chunk.size)
                if status != _native.Status.OK:
                    _log.warning("a stored chunk is unusable (%s); recomputing it", status.name)
                    self.fault(chunk)

    def _next_batch(self) -> tuple[list[Chunk], list[int]]:
        """Dirty chunks, pinned, and their new places on disk; both empty when there are none."""
        batch: list[Chunk] = []
        places: list[int] = []
        with self._lock:
            assert self._disk is not None
            for chunk in list(self._dirty.values())[:_FLUSH_CHUNKS]:
                chunk.pins += 1
                offset = self._disk.tier.reserve(chunk.size, self._may_leave_disk, self._leave_disk)
                if offset is None:
                    self._unpin([chunk])
                    self._drop(chunk)
                    self.counters.no_room += 1
                    continue
                batch.append(chunk)
                places.append(offset)
            return batch, places

    @staticmethod
    def _may_leave_disk(chunk: Chunk) -> bool:
        return chunk.pins == 0

    def _leave_disk(self, chunk: Chunk) -> None:
        self.counters.disk_evicted += 1
        self._drop(chunk)

    def _write(self, batch: Sequence[Chunk], places: Sequence[int]) -> Sequence[Chunk]:
        """Write a batch; the chunks that are on disk now.

        Those that cannot be written leave RAM, too: they would block reclaiming, and can be
        recomputed.
        """
        assert self._disk is not None
        tier = self._disk.tier
        failure = None
        try:
            _native.store_write(
                tier.fd,
                [tier.file_offset(place) for place in places],
                [chunk.size for chunk in batch],
                [self._ram.address(chunk.ram) for chunk in batch],
            )
        except StoreError as error:
            failure = error
            self.counters.io_errors += 1
            _log.error("cannot write to the KV store: %s; contexts will be recomputed", error)
        with self._lock:
            for chunk, place in zip(batch, places, strict=True):
                in_tree = self.tree.get(chunk.id.key) is chunk
                if in_tree and failure is None:
                    self._written(chunk, place)
                    continue
                tier.cancel(place, chunk.size)
                if in_tree:
                    self._drop(chunk)
            self._unpin(batch)
        return batch if failure is None else []

    def _written(self, chunk: Chunk, place: int) -> None:
        assert self._disk is not None
        chunk.disk = place
        self._disk.tier.enter(chunk)
        self._dirty.pop(chunk.id.key, None)
        self._update.added[chunk.id.key] = ChunkRow(chunk.id, place, chunk.size)
        self.counters.written_bytes += chunk.size

    def _commit(self) -> None:
        with self._index_lock:
            if self._disk is None:
                return
            with self._lock:
                update, self._update = self._update, IndexUpdate()
            self._disk.index.apply(update)
