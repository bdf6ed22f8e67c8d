"""Opening and filling the disk tier: lock, index, slab. Anything unusable is a clear miss."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import struct
import uuid
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.index import ChunkIndex, ChunkRow
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS, TOKEN_BYTES
from llmaas_plugins.kv_chunks.tiers import DiskTier
from llmaas_plugins.kv_chunks.tree import Chunk, ChunkTree

__all__ = ["DiskStore"]

_log = logging.getLogger("llmaas.kv_chunks")
_HEADER = struct.Struct("<8sI16s")
_MAGIC = b"LLMAASKV"


class DiskStore:
    """A directory with ``lock``, ``index.sqlite`` and ``chunks.slab``; one process at a time."""

    FORMAT = 1

    def __init__(self, directory: Path, capacity: int) -> None:
        """Open or create the store, mode 0700.

        Raises:
            StoreError: The directory cannot be used, or another process has it open.
        """
        self.directory = directory.expanduser()
        self._lock = self._open_lock()
        try:
            self.tier = DiskTier(self.directory / "chunks.slab", capacity)
            self.index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise StoreError(f"cannot use KV store {self.directory}: {error}") from error

    def load(self, tree: ChunkTree) -> int:
        """Put every sound chunk into ``tree``; rows that cannot be right are dropped.

        Returns:
            Number of rows dropped.
        """
        rows = list(self.index.chunks())
        n_bytes = self.tier.file_bytes()
        kept: list[bytes] = []
        for row in rows:
            if self._is_sound(row, n_bytes) and self.tier.claim(row.offset, row.size):
                chunk = Chunk(row.id, row.size, disk=row.offset)
                tree.add(chunk)
                self.tier.enter(chunk)
                kept.append(row.id.key)
        for name, head in self.index.contexts().items():
            tree.set_head(name, head)
        return len(rows) - len(kept)

    def close(self) -> None:
        """Close the files and let go of the lock."""
        self.index.close()
        self.tier.close()
        os.close(self._lock)

    def _open_lock(self) -> int:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot use KV store {self.directory}: {error.strerror}. "
                "Set plugins.kv_chunks.store to a directory you may write to."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StoreError(
                f"KV store {self.directory} is in use by another process. "
                "Stop it, or set plugins.kv_chunks.store to another directory."
            ) from error
        return lock

    def _open_index(self) -> ChunkIndex:
        path = self.directory / "index.sqlite"
        store_id = uuid.uuid4().bytes
        try:
            old_umask = os.umask(0o077)
            try:
                index = ChunkIndex(path, store_id)
            finally:
                os.umask(old_umask)
            expected = _HEADER.pack(_MAGIC, self.FORMAT, index.store_id())
            found = self.tier.read_header()[: _HEADER.size]
            if found == expected:
                return index
            empty = self.tier.file_bytes() == 0 and not list(index.chunks())
            if empty:
                self.tier.write_header(expected)
                return index
            index.close()
            self._set_aside("the slab's header does not belong to the index")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            self._set_aside(str(error))
        index = ChunkIndex(path, store_id)
        self.tier.write_header(_HEADER.pack(_MAGIC, self.FORMAT, store_id))
        return index

    def _set_aside(self, reason: str) -> None:
        _log.warning(
            "KV store %s cannot be used (%s); starting an empty one. Contexts are recomputed. "
            "The old index is kept as index.sqlite.unusable.",
            self.directory,
            reason,
        )
        path = self.directory / "index.sqlite"
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.replace(path.with_name(path.name + ".unusable"))

    @staticmethod
    def _is_sound(row: ChunkRow, file_bytes: int) -> bool:
        n_bytes = len(row.id.tokens)
        return (
            len(row.id.key) == len(row.id.parent) == 32
            and 0 < n_bytes <= CHUNK_TOKENS * TOKEN_BYTES
            and n_bytes % TOKEN_BYTES == 0
            and row.size > 0
            and row.offset >= 0
            and DiskTier.HEADER_BYTES + row.offset + row.size <= file_bytes
        )
