"""Open the disk tier (lock, index and slab) and load its chunks. Unusable data count as a miss."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import uuid
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins._native import CHUNK_BITS
from llmaas_plugins.files.store_lock import lock, unlock
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, TOKEN_BYTES, chunk_key
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.index import ChunkIndex, ChunkRow, IndexUpdate, is_damage
from llmaas_plugins.kv_chunks.store.store_files import FILES, INDEX, LOCK, SLAB, UNUSABLE
from llmaas_plugins.kv_chunks.store.store_format import check_format, pack_header
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, ChunkTree
from llmaas_plugins.kv_chunks.store.write_budget import WriteBudget

__all__ = ["DiskStore", "is_sound", "is_valid_row"]

_log = logging.getLogger("llmaas.kv_chunks")
_abandoned: list[ChunkIndex] = []


class DiskStore:
    """A directory with ``lock``, ``index.sqlite`` and ``chunks.slab``; one process at a time."""

    def __init__(self, directory: Path, capacity: int) -> None:
        """Open the store, or create it with mode 0700.

        Raises:
            StoreError: The directory cannot be used, another process has it open, or the store
                has another format.
        """
        self.directory = directory.expanduser()
        with contextlib.ExitStack() as opened:
            FILES.directory(self.directory)
            self._lock = lock(self.directory / LOCK, FILES)
            opened.callback(unlock, self._lock)
            check_format(self.directory)
            try:
                self.tier = DiskTier(self.directory / SLAB, capacity)
                opened.callback(self.tier.close)
                self.index = self._open_index()
            except StoreError:
                raise
            except (OSError, sqlite3.Error) as error:
                raise StoreError(f"cannot use KV store {self.directory}: {error}") from error
            opened.callback(self.index.close)
            self._opened = opened.pop_all()

    def load(self, tree: ChunkTree) -> IndexUpdate:
        """Put every valid chunk into ``tree``, and ghosts of the others that valid ones continue.

        Returns:
            Rows of the new ghosts, and keys of rows that are of no use. The caller must change the
            index so with the next commit, or their places would stay occupied after the next start.

        Raises:
            StoreError: The index cannot be read.
        """
        update = IndexUpdate()
        try:
            n_bytes = self.tier.file_size()
            update.removed += [b""] * self.index.drop_malformed()
            for row in list(self.index.chunks()):
                if is_valid_row(row, n_bytes) and self.tier.claim(row.offset, row.size):
                    chunk = Chunk(
                        row.id,
                        row.size,
                        row.bits,
                        disk=row.offset,
                        attention=row.attention,
                        n_scores=row.n_scores,
                        n_indexed_scores=row.n_scores,
                    )
                    tree.add(chunk)
                    self.tier.queue.add(chunk)
                elif is_sound(row):
                    ghost = row._replace(offset=ABSENT, size=0, bits=0)
                    tree.add(Chunk(row.id, 0, attention=row.attention, n_scores=row.n_scores))
                    if row != ghost:
                        update.added[row.id.key] = ghost
                else:
                    update.removed.append(row.id.key)
            for name, head in self.index.contexts().items():
                tree.set_head(name, head)
            for last in tree.remove_last_ghosts():
                update.added.pop(last.id.key, None)
                update.removed.append(last.id.key)
            self.tier.truncate_to_capacity()
            if self.index.is_erasing():
                self._resume_erasing()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot read KV store {self.directory}: {error}") from error
        return update

    def end_erasing(self) -> None:
        """Erase deleted contexts from the index's files; the slab was erased before.

        Raises:
            StoreError: The disk failed, or another process is still reading the index's log.
        """
        try:
            (self.directory / UNUSABLE).unlink(missing_ok=True)  # it may also hold tokens
            self.index.end_erasing()
        except StoreError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"KV store {self.directory}: {error}") from error

    def _resume_erasing(self) -> None:
        """Finish a deletion that an earlier process did not complete."""
        try:
            self.tier.erase(self.tier.take_stale())
            self.end_erasing()
        except StoreError as error:
            _log.warning("%s; the next deletion tries again", error)

    def write_budget(self, limit: int | None) -> WriteBudget:
        """Return the write budget for today.

        Raises:
            StoreError: The index cannot be read.
        """
        try:
            return WriteBudget(limit, self.index.written_on)
        except sqlite3.Error as error:
            raise StoreError(f"cannot read KV store {self.directory}: {error}") from error

    def close(self) -> None:
        """Close the files and release the lock."""
        self._opened.close()

    def abandon(self) -> None:
        """Close what the parent process opened, in a forked child, without changing any file."""
        self._opened.pop_all()  # only the parent may run the callbacks
        self.tier.close()
        os.close(self._lock)
        _abandoned.append(self.index)  # never closed, because closing makes SQLite write

    def _open_index(self) -> ChunkIndex:
        store_id = uuid.uuid4().bytes
        path = self.directory / INDEX
        try:
            index = ChunkIndex(path, store_id)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._quarantine_index(str(error))
        else:
            expected = pack_header(index.store_id())
            if self.tier.read_header()[: len(expected)] == expected:
                return index
            is_new = self.tier.file_size() == 0 and not list(index.chunks())
            if is_new:
                return self._begun(index, expected)
            index.close()
            self._quarantine_index("the slab's header does not belong to the index")
        return self._begun(ChunkIndex(path, store_id), pack_header(store_id))

    def _begun(self, index: ChunkIndex, header: bytes) -> ChunkIndex:
        """Write the header of a new index's slab, and return the index."""
        try:
            self.tier.write_header(header)
        except BaseException:
            index.close()
            raise
        return index

    def _quarantine_index(self, reason: str) -> None:
        _log.warning(
            "KV store %s cannot be used (%s); starting an empty one. Contexts will be recomputed. "
            "The old index is kept as index.sqlite.unusable.",
            self.directory,
            reason,
        )
        path = self.directory / INDEX
        for suffix in ("-wal", "-shm", "-journal"):  # or SQLite would apply them to the new index
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.replace(self.directory / UNUSABLE)


def is_sound(row: ChunkRow) -> bool:
    """Return whether a row tells a chunk's tokens and attention; a ghost's row tells no more."""
    n_bytes = len(row.id.tokens)
    return (
        row.id.key == chunk_key(row.id.parent, row.id.tokens)
        and 0 < n_bytes <= CHUNK_TOKENS * TOKEN_BYTES
        and n_bytes % TOKEN_BYTES == 0
        and 0 <= row.attention < math.inf
        and 0 <= row.n_scores < math.inf
    )


def is_valid_row(row: ChunkRow, file_bytes: int) -> bool:
    """Return whether a row is plausible for a slab of ``file_bytes``; the payload is not read."""
    return (
        is_sound(row)
        and row.size > 0
        and 0 <= row.bits <= CHUNK_BITS
        and row.offset >= 0
        and DiskTier.HEADER_BYTES + row.offset + row.size <= file_bytes
    )
