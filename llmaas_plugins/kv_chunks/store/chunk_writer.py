"""Write dirty chunks to disk ahead of time (LLMS §3.4), and keep the index up to date."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.index import IndexUpdate
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency
from llmaas_plugins.kv_chunks.store.tree import Chunk
from llmaas_plugins.signals import signals_wait

__all__ = ["ChunkWriter"]

_log = logging.getLogger("llmaas.kv_chunks")
_BATCH_CHUNKS = 64
_GLANCE_S = 0.1


class ChunkWriter:
    """Writer of a store's chunks and index. Thread-safe; writes hold no lock of the residency."""

    def __init__(
        self, residency: ChunkResidency, disk: DiskStore, write_budget: int | None
    ) -> None:
        """Load the chunks on ``disk``; write at most ``write_budget`` bytes each day.

        Raises:
            StoreError: The index cannot be read.
        """
        self.directory = disk.directory
        self._is_open = True
        self._residency = residency
        self._disk = disk
        self._write_budget = disk.write_budget(write_budget)
        self._flush_lock = threading.Lock()  # hold it by `_alone` or while signals wait
        self._index_lock = threading.Lock()  # hold it only while signals wait
        self._new: list[Chunk] = []  # written since the last complete flush
        self._lost: dict[bytes, Chunk] = {}  # to be dropped at the end of a flush
        self._write_failures, self._index_failures = FailureLog(_log), FailureLog(_log)
        self._heads: Mapping[str, bytes] | None = None  # in the index; None if that is unknown
        residency.update = disk.load(residency.tree)
        residency.counters.faults += len(residency.update.removed) + len(residency.update.added)

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index; count and log errors.

        Ctrl-C ends this between two batches, and the next call continues.
        """
        while self._is_open and self._flush_batch():  # a forked child must not touch the locks
            pass

    def _flush_batch(self) -> bool:
        """Write some dirty chunks; once no more can be written, commit and return False."""
        with self._alone():
            if not self._is_open:
                return False
            n_dirty = len(self._residency.dirty)
            batch, offsets = self._next_batch()
            if batch or len(self._residency.dirty) < n_dirty:
                if self._disk.tier.reuses_held:
                    self._try_commit()  # no row may name a place that is about to be overwritten
                self._write(batch, offsets)
                return True
            self._end_flush()  # also if today's write budget is used up
            return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread write chunks or erase any, and delay signals.

        Signals are not delayed while this waits for another thread.
        """
        while True:
            with signals_wait():
                if self._flush_lock.acquire(timeout=_GLANCE_S):
                    try:
                        yield
                    finally:
                        self._flush_lock.release()
                    return

    def _end_flush(self) -> None:
        with self._residency.lock:
            for chunk in reversed(self._lost.values()):  # contexts shrink from their end
                self._residency.drop_bytes(chunk)
            self._lost.clear()
            self._residency.mark_written_used(self._new)
            self._new.clear()
        self._try_commit()

    @signals_wait()
    def commit(self) -> None:
        """Commit all changes to the index, in which contexts end with chunks that it has.

        Raises:
            StoreError: The index cannot be written; the next commit tries again.
        """
        with self._index_lock:
            with self._residency.lock:
                update, self._residency.update = self._residency.update, IndexUpdate()
                heads = self._residency.tree.heads_on_disk()
                reuses_held, held = self._disk.tier.reuses_held, self._disk.tier.take_held()
            update.writes = self._write_budget.written()
            update.heads = None if heads == self._heads else heads
            update.heads_before = self._heads
            try:
                self._disk.index.apply(update)
            except BaseException as error:
                self._heads = None  # all of them are written again
                with self._residency.lock:
                    self._residency.update = update.merged_with(self._residency.update)
                    self._disk.tier.hold_again(held, reuses_held=reuses_held)
                if isinstance(error, sqlite3.Error | ValueError):  # of text that is not Unicode
                    raise StoreError(f"KV store's index: {error}") from error
                raise
            self._heads = heads
            with self._residency.lock:
                self._disk.tier.release(held)

    def erase_freed(self) -> None:
        """Commit all changes to the index, and erase the bytes of removed chunks on disk.

        Raises:
            StoreError: The commit or the erasure failed; the next call tries again.
        """
        with self._alone():  # no chunk may take these ranges meanwhile
            if not self._is_open:
                raise StoreError(
                    f"KV store {self.directory} was closed before the bytes of removed "
                    "chunks were erased; delete again after the next start"
                )
            with self._residency.lock:
                stale = self._disk.tier.take_stale()
                self._residency.update.erases = True
            try:
                self._commit_or_erase_first(stale)
            finally:
                self._disk.tier.erase(stale)
            with self._index_lock:
                self._disk.end_erasing()

    def _commit_or_erase_first(self, stale: Sequence[tuple[int, int]]) -> None:
        """Commit; if that fails (full disk), erase ``stale`` ranges first and commit again."""
        try:
            self.commit()
        except StoreError:
            if not stale:
                raise
            self._disk.tier.erase(stale)
            self.commit()

    @signals_wait()
    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root`` that an earlier process stored, or None."""
        with self._index_lock:
            try:
                return self._disk.index.layout(root) if self._is_open else None
            except sqlite3.Error as error:
                self._failed(self._index_failures, error)
                return None

    @signals_wait()
    def close(self) -> None:
        """Close the files; a flush in another thread ends after its batch."""
        self._is_open = False
        with self._flush_lock, self._index_lock, self._residency.lock:
            self._residency.disk = None
            self._disk.close()

    def abandon(self) -> None:
        """Close the files in a forked child without changing them, as the parent uses them."""
        if self._is_open:
            self._is_open = False
            self._disk.abandon()

    def _try_commit(self) -> None:
        try:
            self.commit()
        except StoreError as error:
            self._failed(self._index_failures, error)
        else:
            self._index_failures.worked()

    def _next_batch(self) -> tuple[list[Chunk], list[int]]:
        """Pin dirty chunks; return them with their offsets on disk. Others are lost."""
        batch: list[Chunk] = []
        offsets: list[int] = []
        with self._residency.lock:
            n_left = self._write_budget.remaining()
            for chunk in list(self._residency.dirty.values())[:_BATCH_CHUNKS]:
                n_left -= page_round(chunk.size)
                if n_left < 0:
                    self._residency.counters.over_write_budget += 1
                    break
                offset = None
                if chunk.id.parent not in self._lost:
                    offset = self._residency.reserve_disk(chunk.size)
                if offset is None:
                    self._lose(chunk)
                    self._residency.counters.no_room += 1
                    continue
                self._residency.pin([chunk])
                batch.append(chunk)
                offsets.append(offset)
            return batch, offsets

    def _lose(self, chunk: Chunk) -> None:
        """Mark a chunk as lost: it cannot be written, so it could never leave RAM otherwise."""
        del self._residency.dirty[chunk.id.key]
        self._lost[chunk.id.key] = chunk

    def _write(self, batch: Sequence[Chunk], offsets: Sequence[int]) -> None:
        tier = self._disk.tier
        failure = None
        try:
            _native.store_write(
                tier.fd,
                [tier.file_offset(offset) for offset in offsets],
                [chunk.size for chunk in batch],
                [self._residency.ram.address(chunk.ram) for chunk in batch],
            )
        except StoreError as error:
            failure = error
        with self._residency.lock:
            # The held places may be the only ones that a full file system has left.
            is_retried = failure is not None and tier.release_early()
            for chunk, offset in zip(batch, offsets, strict=True):
                in_tree = self._residency.tree.get(chunk.id.key) is chunk
                if in_tree and failure is None:
                    self._written(chunk, offset)
                    continue
                tier.cancel(offset, chunk.size)
                if in_tree and not is_retried:
                    self._lose(chunk)
            self._residency.unpin(batch)
        if failure is None:
            self._write_failures.worked()
        elif not is_retried:
            self._failed(self._write_failures, failure)

    def _written(self, chunk: Chunk, offset: int) -> None:
        chunk.disk = offset
        self._new.append(chunk)
        self._disk.tier.queue.add(chunk)
        self._residency.dirty.pop(chunk.id.key, None)
        self._residency.queue_index_update(chunk)
        self._residency.counters.written_bytes += chunk.size
        self._write_budget.spend(page_round(chunk.size))

    def _failed(self, failures: FailureLog, error: Exception) -> None:
        self._residency.counters.io_errors += 1
        failures.failed("cannot write to the KV store: %s; contexts will be recomputed", error)
