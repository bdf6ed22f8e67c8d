"""Write dirty chunks to disk ahead of time (LLMS §3.4), and keep the index up to date."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.index import IndexUpdate
from llmaas_plugins.kv_chunks.store.residency import Shelf
from llmaas_plugins.kv_chunks.store.tree import Chunk
from llmaas_plugins.trouble import Trouble

__all__ = ["SwapOut"]

_log = logging.getLogger("llmaas.kv_chunks")
_BATCH_CHUNKS = 64


class SwapOut:
    """Writer of a store's chunks and index. Thread-safe; writes run outside the shelf's lock."""

    def __init__(self, shelf: Shelf, disk: DiskStore, write_budget: int | None) -> None:
        """Load the chunks on ``disk``; write at most ``write_budget`` bytes each day.

        Raises:
            StoreError: The index cannot be read.
        """
        self.directory = disk.directory
        self._shelf = shelf
        self._disk = disk
        self._allowance = disk.allowance(write_budget)
        self._flush_lock = threading.Lock()
        self._index_lock = threading.Lock()
        self._writing, self._indexing = Trouble(_log), Trouble(_log)
        unsound = disk.load(shelf.tree)
        shelf.counters.faults += len(unsound)
        shelf.update.removed += unsound

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index. Errors are counted and logged."""
        with self._flush_lock:
            written: list[Chunk] = []
            lost: dict[bytes, Chunk] = {}
            while self._shelf.dirty:
                n_dirty = len(self._shelf.dirty)
                batch, places = self._next_batch(lost)
                if not batch and len(self._shelf.dirty) == n_dirty:
                    break  # today's write budget is used up
                if self._shelf.update.removed or self._shelf.update.frees_room:
                    self._try_commit()  # no row may name a place that is about to be overwritten
                written += self._write(batch, places, lost)
            with self._shelf.lock:
                for chunk in reversed(lost.values()):  # contexts shrink from their end
                    if self._shelf.tree.get(chunk.id.key) is chunk:
                        self._shelf.drop(chunk)
                self._shelf.order_on_disk(written)
            self._try_commit()

    def commit(self) -> None:
        """Commit all changes to the index.

        Raises:
            StoreError: The index cannot be written; the next commit tries again.
        """
        with self._index_lock:
            with self._shelf.lock:
                update, self._shelf.update = self._shelf.update, IndexUpdate()
            update.writes = self._allowance.written()
            try:
                self._disk.index.apply(update)
            except sqlite3.Error as error:
                with self._shelf.lock:
                    self._shelf.update = update.then(self._shelf.update)
                raise StoreError(f"KV store's index: {error}") from error

    def erase_freed(self) -> None:
        """Commit all changes to the index, and erase the bytes of removed chunks on disk.

        Raises:
            StoreError: The commit or the erasure failed; the next call tries again.
        """
        with self._flush_lock:  # no chunk may take these places meanwhile
            with self._shelf.lock:
                places = self._disk.tier.take_stale()
                self._shelf.update.erases = True
            try:
                self._commit_behind(places)
            finally:
                self._disk.tier.erase(places)
            with self._index_lock:
                self._disk.end_erasing()

    def _commit_behind(self, places: Sequence[tuple[int, int]]) -> None:
        """Commit; if that fails, erase ``places`` in the slab and commit again (full disk)."""
        try:
            self.commit()
        except StoreError:
            if not places:
                raise
            self._disk.tier.erase(places)
            self.commit()

    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root`` that an earlier process stored, or None."""
        with self._index_lock:
            try:
                return self._disk.index.geometry(root)
            except sqlite3.Error as error:
                self._failed(self._indexing, error)
                return None

    def close(self) -> None:
        """Close the files."""
        with self._index_lock, self._shelf.lock:
            self._disk.close()

    def abandon(self) -> None:
        """Close the files in a forked child without changing them, as the parent uses them."""
        self._disk.abandon()

    def _try_commit(self) -> None:
        try:
            self.commit()
        except StoreError as error:
            self._failed(self._indexing, error)
        else:
            self._indexing.worked()

    def _next_batch(self, lost: dict[bytes, Chunk]) -> tuple[list[Chunk], list[int]]:
        """Pin dirty chunks; return them with their places on disk. Others go to ``lost``."""
        batch: list[Chunk] = []
        places: list[int] = []
        with self._shelf.lock:
            left = self._allowance.left()
            for chunk in list(self._shelf.dirty.values())[:_BATCH_CHUNKS]:
                left -= page_round(chunk.size)
                if left < 0:
                    self._shelf.counters.over_write_budget += 1
                    break
                offset = None
                if chunk.id.parent not in lost:
                    offset = self._shelf.reserve_disk(chunk.size)
                if offset is None:
                    self._lose(chunk, lost)
                    self._shelf.counters.no_room += 1
                    continue
                chunk.pins += 1
                batch.append(chunk)
                places.append(offset)
            return batch, places

    def _lose(self, chunk: Chunk, lost: dict[bytes, Chunk]) -> None:
        """Mark a chunk as lost: it cannot be written, so it could never leave RAM otherwise."""
        del self._shelf.dirty[chunk.id.key]
        lost[chunk.id.key] = chunk

    def _write(
        self, batch: Sequence[Chunk], places: Sequence[int], lost: dict[bytes, Chunk]
    ) -> Sequence[Chunk]:
        """Write a batch; return the chunks that are on disk now."""
        tier = self._disk.tier
        failure = None
        try:
            _native.store_write(
                tier.fd,
                [tier.file_offset(place) for place in places],
                [chunk.size for chunk in batch],
                [self._shelf.ram.address(chunk.ram) for chunk in batch],
            )
        except StoreError as error:
            failure = error
            self._failed(self._writing, error)
        else:
            self._writing.worked()
        with self._shelf.lock:
            for chunk, place in zip(batch, places, strict=True):
                in_tree = self._shelf.tree.get(chunk.id.key) is chunk
                if in_tree and failure is None:
                    self._written(chunk, place)
                    continue
                tier.cancel(place, chunk.size)
                if in_tree:
                    self._lose(chunk, lost)
            self._shelf.unpin(batch)
        return batch if failure is None else []

    def _written(self, chunk: Chunk, place: int) -> None:
        chunk.disk = place
        self._disk.tier.queue.enter(chunk)
        self._shelf.dirty.pop(chunk.id.key, None)
        self._shelf.note_row(chunk)
        self._shelf.counters.written_bytes += chunk.size
        self._allowance.spend(page_round(chunk.size))

    def _failed(self, trouble: Trouble, error: Exception) -> None:
        self._shelf.counters.io_errors += 1
        trouble.failed("cannot write to the KV store: %s; contexts will be recomputed", error)
