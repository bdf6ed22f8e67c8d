"""Read the contents of a store without changing it, even while another process uses it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Status
from llmaas_plugins.files.store_lock import user
from llmaas_plugins.kv_chunks.store.disk_store import is_sound, is_valid_row
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.extents import ExtentAllocator, page_round
from llmaas_plugins.kv_chunks.store.huge_pages import map_huge_pages
from llmaas_plugins.kv_chunks.store.index import ChunkIndex, ChunkRow, is_damage
from llmaas_plugins.kv_chunks.store.store_files import FILES, INDEX, LOCK, SLAB, require_store
from llmaas_plugins.kv_chunks.store.store_format import check_format, pack_header

__all__ = ["StoreSnapshot", "read_payloads", "read_snapshot"]

_MAX_CHUNK_BYTES = 1 << 30
_MAX_TRIES = 4


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Snapshot of a store.

    Attributes:
        directory: Directory of the store.
        holder: Description of the process that uses the store, or None.
        rows: Valid chunks by key, least recently used first.
        ghosts: Rows of lost chunks that others continue, by key.
        n_invalid_rows: Number of rows that are malformed, outside the slab, or overlap another.
        contexts: Key of the last chunk of each named context, least recently used first.
        layouts: Layout of the cells under each root, as JSON.
        slab_bytes: Length of the slab file.
        has_matching_slab: Whether the slab's header names this index.
    """

    directory: Path
    holder: str | None
    rows: Mapping[bytes, ChunkRow]
    ghosts: Mapping[bytes, ChunkRow]
    n_invalid_rows: int
    contexts: Mapping[str, bytes]
    layouts: Mapping[bytes, str]
    slab_bytes: int
    has_matching_slab: bool

    def is_reachable(self, row: ChunkRow) -> bool:
        """Return whether the chunk's parent is a known chunk or the root of a known model."""
        return self.before(row) is not None or row.id.parent in self.layouts

    def before(self, row: ChunkRow) -> ChunkRow | None:
        """Return the row of the chunk, or the ghost, that this chunk continues."""
        return self.rows.get(row.id.parent) or self.ghosts.get(row.id.parent)

    def root(self, row: ChunkRow) -> bytes:
        """Return the parent of the chain's first chunk: a model's root or a missing chunk's key."""
        while (before := self.before(row)) is not None:
            row = before
        return row.id.parent


def read_snapshot(directory: Path) -> StoreSnapshot:
    """Read everything but the payloads of the chunks.

    Raises:
        StoreError: There is no store, it has another format, or it cannot be read.
        sqlite3.DatabaseError: The index is damaged.
    """
    directory = directory.expanduser()
    require_store(directory)
    tries = itertools.count(1)
    while True:
        is_last, before = next(tries) == _MAX_TRIES, _stamp(directory)
        try:
            found = _read_once(directory)
        except (StoreError, sqlite3.DatabaseError):
            if is_last or _stamp(directory) == before:
                raise
        else:
            if is_last or _stamp(directory) == before:
                return found


def read_payloads(
    directory: Path, rows: Iterable[ChunkRow]
) -> Iterator[tuple[ChunkRow, Status, memoryview]]:
    """Read and verify chunks; yield each row, its status, and its bytes in whole pages.

    The bytes of a chunk are valid until the next one is asked for.

    Raises:
        StoreError: The slab cannot be opened.
    """
    fd = FILES.open(directory / SLAB, os.O_RDONLY)
    buffer = map_huge_pages(0)
    try:
        for row in rows:
            if row.size > _MAX_CHUNK_BYTES:
                yield row, Status.ECORRUPT, memoryview(b"")
                continue
            if page_round(row.size) > len(buffer):
                buffer = map_huge_pages(page_round(row.size))
            status = _read(fd, row, int(buffer.ctypes.data))
            if status == Status.EIO:  # try again: an I/O error may be temporary
                status = _read(fd, row, int(buffer.ctypes.data))
            buffer[row.size : page_round(row.size)] = 0  # clear an earlier chunk's bytes
            yield row, status, buffer[: page_round(row.size)].data
    finally:
        os.close(fd)


def _read(fd: int, row: ChunkRow, address: int) -> Status:
    offset = DiskTier.HEADER_BYTES + row.offset
    (status,) = _native.store_read(fd, [offset], [row.size], [address], [row.id.key])
    return status


def _stamp(directory: Path) -> tuple[object, ...]:
    """Return a value that changes when another process opens or changes an idle store.

    Reading takes no lock, because an app that starts meanwhile must be able to lock the store.
    """
    try:
        index = (directory / INDEX).stat()
    except OSError:
        return ()
    has_log = (directory / f"{INDEX}-wal").exists()
    return index.st_ino, index.st_size, index.st_mtime_ns, has_log


def _read_once(directory: Path) -> StoreSnapshot:
    holder = user(directory / LOCK, FILES)
    check_format(directory)
    with contextlib.ExitStack() as opened:
        try:
            index = ChunkIndex.read_only(directory / INDEX)
            opened.callback(index.close)
            index.begin_snapshot()
            return _contents(directory, holder, index)
        except StoreError:
            raise
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                raise
            raise StoreError(f"cannot read KV store {directory}: {error}") from error


def _contents(directory: Path, holder: str | None, index: ChunkIndex) -> StoreSnapshot:
    header, slab_bytes = _slab_header(directory / SLAB)
    expected = pack_header(index.store_id())
    n_space = max(0, slab_bytes - DiskTier.HEADER_BYTES)
    rows = list(index.chunks())
    ghosts = {row.id.key: row for row in rows if row.size == 0 and is_sound(row)}
    stored = (row for row in rows if row.id.key not in ghosts)
    valid, n_invalid = _valid_rows(stored, slab_bytes, ExtentAllocator(page_round(n_space)))
    order = {key: i for i, key in enumerate(valid)}
    contexts = sorted(index.contexts().items(), key=lambda item: order.get(item[1], -1))
    return StoreSnapshot(
        directory, holder, valid, ghosts, n_invalid + index.n_malformed(), dict(contexts),
        index.layouts(), slab_bytes, header[: len(expected)] == expected,
    )  # fmt: skip


def _valid_rows(
    rows: Iterable[ChunkRow], slab_bytes: int, space: ExtentAllocator
) -> tuple[dict[bytes, ChunkRow], int]:
    valid: dict[bytes, ChunkRow] = {}
    n_invalid: Sequence[ChunkRow] = [
        row
        for row in rows
        if not (
            is_valid_row(row, slab_bytes)
            and space.claim(row.offset, row.size)
            and valid.setdefault(row.id.key, row)
        )
    ]
    return valid, len(n_invalid)


def _slab_header(path: Path) -> tuple[bytes, int]:
    if not os.path.lexists(path):
        return b"", 0
    fd = FILES.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, DiskTier.HEADER_BYTES, 0), os.fstat(fd).st_size
    finally:
        os.close(fd)
