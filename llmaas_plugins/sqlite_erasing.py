"""SQLite databases with texts: what was deleted is in no byte of their files.

``secure_delete`` overwrites rows that are deleted. Two kinds of copies are left: those in the
write-ahead log, and those in the free space inside of pages, where SQLite leaves rows behind that
it moves to other pages. Both are erased here.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import StoreError
from llmaas_plugins.store_lock import readers

__all__ = ["PATIENCE_S", "Eraser", "connect"]

PATIENCE_S = 5.0
"""How long a statement waits for other connections; then it fails."""
_MOST_TRIES = 8
_BLOCK_PAGES = 256
_TREE_PAGES = {2: 12, 5: 12, 10: 8, 13: 8}  # bytes of the header by the first byte
_FILE_HEADER = 100
_MOST_PAGES = 1 << 24  # first bytes of other pages are zero then


def connect(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Open a database that may hold texts: deleted rows are overwritten, nothing goes to /tmp.

    Raises:
        sqlite3.Error: It cannot be opened, or is damaged.
    """
    db = sqlite3.connect(
        database, PATIENCE_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    try:
        db.execute("PRAGMA secure_delete=ON")
        db.execute("PRAGMA temp_store=MEMORY")
        db.execute("PRAGMA auto_vacuum=NONE")  # of a new file: its pages can be told apart
    except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
        db.close()
        raise sqlite3.DatabaseError(f"{database} is damaged: its schema is no text") from error
    except BaseException:
        db.close()
        raise
    return db


class _Gap(NamedTuple):
    """Free space inside of a page, which holds other bytes than zeros.

    Attributes:
        offset: Where it begins in the file.
        n_bytes: Its length.
    """

    offset: int
    n_bytes: int


class Eraser:
    """Erases what was deleted from one database. Close it after the connection."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        """Attach to a connection in WAL mode, opened with ``connect``."""
        self._db = db
        self._path = path
        self._log = path.with_name(path.name + "-wal")
        self._file: int | None = None

    def erase(self) -> None:
        """Leave nothing of deleted rows in any file.

        Raises:
            StoreError: Somebody went on reading for ``PATIENCE_S``; the message says who.
            OSError: The disk failed.
            sqlite3.Error: The disk failed.
        """
        for _ in range(_MOST_TRIES):
            self._empty_log()
            self._db.execute(
                "BEGIN IMMEDIATE"
            )  # nobody writes, so pages of the file stay as they are
            try:
                is_done = not self._log.exists() or self._log.stat().st_size == 0
                if is_done:
                    self._fill_gaps()
            finally:
                self._db.execute("ROLLBACK")
            if is_done:
                self._db.execute("PRAGMA shrink_memory")  # cached pages have their gaps, too
                return
        raise StoreError(
            f"what was deleted cannot be erased from {self._path}: it changes meanwhile."
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _empty_log(self) -> None:
        """Fold the log into the file and truncate it."""
        (is_busy, _, _) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            who = ", ".join(readers(self._path)) or "another process"
            raise StoreError(
                f"what was deleted cannot be erased from {self._path} yet: {who} has been reading "
                f"it for {PATIENCE_S:g} s. Stop that, then delete again."
            )

    def _fill_gaps(self) -> None:
        """Write zeros over the free space inside of pages; nobody ever reads what is there."""
        if self._file is None:  # kept open: closing it would drop SQLite's locks on the file
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        gaps = list(_gaps(self._file))
        for gap in gaps:
            os.pwrite(self._file, bytes(gap.n_bytes), gap.offset)
        if gaps:
            os.fsync(self._file)


def _gaps(file: int) -> Iterator[_Gap]:
    header = os.pread(file, _FILE_HEADER, 0)
    if len(header) < _FILE_HEADER:
        return
    (page_bytes,) = struct.unpack_from(">H", header, 16)
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
    usable = page_bytes - header[20]
    n_pages = os.fstat(file).st_size // page_bytes
    if any(header[52:56]) or n_pages > _MOST_PAGES:  # pages of other kinds would look like ours
        raise StoreError("nothing can be erased from an SQLite file with auto_vacuum; copy it")
    for first in range(0, n_pages, _BLOCK_PAGES):
        block = os.pread(file, _BLOCK_PAGES * page_bytes, first * page_bytes)
        for at in range(0, len(block), page_bytes):
            page = block[at : at + usable]
            start, end = _gap(page, 0 if first or at else _FILE_HEADER)
            if page.count(0, start, end) < end - start:
                yield _Gap(first * page_bytes + at + start, end - start)


def _gap(page: bytes, at: int) -> tuple[int, int]:
    """Where the free space between a b-tree page's cell pointers and its cells is; or nowhere."""
    header_bytes = _TREE_PAGES.get(page[at])
    if header_bytes is None:
        return 0, 0
    n_cells, cells = struct.unpack_from(">HH", page, at + 3)
    start, end = at + header_bytes + 2 * n_cells, cells or 1 << 16
    return (start, end) if start < end <= len(page) else (0, 0)
