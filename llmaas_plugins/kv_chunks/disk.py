"""Opening and filling the disk tier: lock, index, slab. Anything unusable is a clear miss."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import struct
import uuid
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.index import ChunkIndex, ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS, TOKEN_BYTES, chunk_key
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
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._open_lock())
            try:
                self.tier = DiskTier(self.directory / "chunks.slab", capacity)
                opened.callback(self.tier.close)
                self.index = self._open_index()
            except (OSError, sqlite3.Error) as error:
                raise StoreError(f"cannot use KV store {self.directory}: {error}") from error
            opened.callback(self.index.close)
            self._opened = opened.pop_all()

    def load(self, tree: ChunkTree) -> int:
        """Put every sound chunk into ``tree``; rows that cannot be right are dropped.

        Returns:
            Number of rows dropped.
        """
        n_bytes = self.tier.file_bytes()
        dropped: list[bytes] = []
        for row in list(self.index.chunks()):
            if self._is_sound(row, n_bytes) and self.tier.claim(row.offset, row.size):
                chunk = Chunk(row.id, row.size, disk=row.offset)
                tree.add(chunk)
                self.tier.enter(chunk)
            else:
                dropped.append(row.id.key)
        for name, head in self.index.contexts().items():
            tree.set_head(name, head)
        if dropped:  # or they would claim their places again, in the way of new chunks
            self.index.apply(IndexUpdate(removed=dropped))
        self.tier.trim()
        return len(dropped)

    def close(self) -> None:
        """Close the files and let go of the lock."""
        self._opened.close()

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
        store_id = uuid.uuid4().bytes
        try:
            index = self._index(store_id)
        except sqlite3.DatabaseError as error:
            is_schema = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
            if isinstance(error, sqlite3.OperationalError) and not is_schema:
                raise
            self._set_aside(str(error))
        else:
            expected = _HEADER.pack(_MAGIC, self.FORMAT, index.store_id())
            if self.tier.read_header()[: _HEADER.size] == expected:
                return index
            is_new = self.tier.file_bytes() == 0 and not list(index.chunks())
            index.close()
            if is_new:
                self.tier.write_header(expected)
                return self._index(store_id)
            self._set_aside("the slab's header does not belong to the index")
        self.tier.write_header(_HEADER.pack(_MAGIC, self.FORMAT, store_id))
        return self._index(store_id)

    def _index(self, new_store_id: bytes) -> ChunkIndex:
        old_umask = os.umask(0o077)
        try:
            return ChunkIndex(self.directory / "index.sqlite", new_store_id)
        finally:
            os.umask(old_umask)

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
            row.id.key == chunk_key(row.id.parent, row.id.tokens)
            and 0 < n_bytes <= CHUNK_TOKENS * TOKEN_BYTES
            and n_bytes % TOKEN_BYTES == 0
            and row.size > 0
            and row.offset >= 0
            and DiskTier.HEADER_BYTES + row.offset + row.size <= file_bytes
        )
