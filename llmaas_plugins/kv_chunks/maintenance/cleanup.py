"""Delete contexts and useless chunks of a store that no process uses."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins._native import Status
from llmaas_plugins.kv_chunks.maintenance.checking import Progress
from llmaas_plugins.kv_chunks.maintenance.snapshot import (
    read_payloads,
)
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.index import ChunkRow, IndexUpdate
from llmaas_plugins.kv_chunks.store.store_files import SLAB, require_store
from llmaas_plugins.kv_chunks.store.tree import Chunk, ChunkTree, names_of

__all__ = ["CleanupResult", "StoreCleanup", "disk_bytes"]


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """Result of tidying a store.

    Attributes:
        n_contexts: Number of deleted named contexts.
        n_chunks: Number of deleted chunks and invalid rows.
        freed_bytes: Bytes freed on disk.
    """

    n_contexts: int
    n_chunks: int
    freed_bytes: int


class StoreCleanup:
    """A store opened for exclusive maintenance; call ``close`` at the end."""

    def __init__(self, directory: Path) -> None:
        """Open an existing store; no budget applies.

        Raises:
            StoreError: The store is in use, has another format, or does not exist.
        """
        self._directory = directory.expanduser()
        require_store(self._directory)
        self._before = disk_bytes(self._directory)
        slab = self._directory / SLAB
        length = slab.lstat().st_size if slab.exists() else 0
        self._disk = DiskStore(self._directory, page_round(max(length, DiskTier.HEADER_BYTES)))
        self._tree = ChunkTree()
        try:
            self._found = self._disk.load(self._tree)
        except BaseException:
            self._disk.close()
            raise
        self._removed = self._found.removed
        self._contexts = len(self._tree.contexts())

    def contexts(self) -> list[str]:
        """Return the names of all contexts."""
        return sorted(self._tree.contexts())

    def forget(self, context_id: str) -> None:
        """Delete a context and the chunks that only it needs."""
        for name in names_of(context_id):
            for chunk in self._tree.forget_context(name):
                self._drop(chunk)

    def forget_all(self) -> None:
        """Delete all chunks, including those of unnamed contexts."""
        for name in self.contexts():
            self.forget(name)
        for chunk in list(self._tree):
            self._drop(chunk)

    def drop_damaged(self, progress: Progress = iter) -> None:
        """Read every chunk; drop damaged ones and all chunks that continue them."""
        stored = (chunk for chunk in self._tree if not chunk.is_ghost)
        chunks = sorted(stored, key=lambda chunk: chunk.disk)
        rows = [ChunkRow(chunk.id, chunk.disk, chunk.size) for chunk in chunks]
        for row, status, _ in read_payloads(self._directory, progress(rows)):
            if status != Status.OK:
                self._drop_from(self._tree.get(row.id.key))

    def drop_unreachable(self) -> None:
        """Drop chunks that continue a missing chunk or a ghost, and ghosts."""
        roots = self._disk.index.layouts()
        for chunk in list(self._tree):
            is_there = self._tree.get(chunk.id.key) is chunk
            is_first = chunk.id.parent in roots
            is_missing = chunk.is_ghost or not (is_first or self._tree.get(chunk.id.parent))
            if is_there and is_missing:
                self._drop_from(chunk)

    def finish(self, *, shrink: bool) -> CleanupResult:
        """Commit, erase deleted data, and return the space to the file system.

        Args:
            shrink: Whether to rewrite the index without gaps.

        Raises:
            StoreError: The disk failed; call it again.
        """
        index, tier = self._disk.index, self._disk.tier
        try:
            index.apply(self._update())
            tier.erase(tier.take_stale())
            tier.truncate_tail()
            if shrink:
                index.vacuum()
            self._disk.end_erasing()
        except StoreError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot tidy KV store {self._directory}: {error}") from error
        n_contexts = self._contexts - len(self._tree.contexts())
        freed = self._before - disk_bytes(self._directory)
        return CleanupResult(n_contexts, len(self._removed), max(0, freed))

    def _update(self) -> IndexUpdate:
        gone = set(self._removed)
        ghosts = {key: row for key, row in self._found.added.items() if key not in gone}
        heads = self._tree.heads_on_disk()
        return IndexUpdate(ghosts, self._removed, heads=heads, erases=True)

    def close(self) -> None:
        """Close the store and release its lock."""
        self._disk.close()

    def _drop_from(self, chunk: Chunk | None) -> None:
        """Drop a chunk and all that continue it; contexts through it then end before it."""
        for one in [] if chunk is None else reversed(self._tree.subtree(chunk)):
            self._drop(one)

    def _drop(self, chunk: Chunk) -> None:
        self._tree.remove(chunk)
        if not chunk.is_ghost:
            self._disk.tier.free(chunk, chunk.disk)
        self._removed.append(chunk.id.key)


def disk_bytes(directory: Path) -> int:
    """Return the disk space of a store's files, without holes and temporary files."""
    lasting = (path for path in directory.iterdir() if not path.name.endswith("-shm"))
    return sum(path.lstat().st_blocks * 512 for path in lasting)
