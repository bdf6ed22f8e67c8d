"""Erase deleted text from every byte of an SQLite database's files.

``secure_delete`` overwrites deleted rows. Two kinds of copies remain: those in the write-ahead log,
and those in the free space inside pages, where SQLite leaves rows that it moved to other pages.
This module erases both.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import StoreError
from llmaas_plugins.files.store_lock import readers
from llmaas_plugins.signals import signals_wait

__all__ = ["PATIENCE_S", "Eraser", "connect"]

PATIENCE_S = 5.0
"""Seconds that a statement waits for other connections before it fails."""
_MOST_TRIES = 8
_BLOCK_PAGES = 256
_TREE_PAGES = {2: 12, 5: 12, 10: 8, 13: 8}  # size of the page header, by its first byte
_FILE_HEADER = 100
_MOST_PAGES = 1 << 24  # in larger files, other pages may not start with zero


def connect(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Open a database that may hold text: deleted rows are overwritten, and nothing goes to /tmp.

    Raises:
        sqlite3.Error: The database cannot be opened, or is damaged.
    """
    db = sqlite3.connect(
        database, PATIENCE_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    try:
        db.execute("PRAGMA secure_delete=ON")
        db.execute("PRAGMA temp_store=MEMORY")
        # In a new file without auto_vacuum, tree pages can be told from other pages.
        db.execute("PRAGMA auto_vacuum=NONE")
    except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
        db.close()
        raise sqlite3.DatabaseError(f"{database} is damaged: its schema is no text") from error
    except BaseException:
        db.close()
        raise
    return db


class _Gap(NamedTuple):
    """Free space inside a page with bytes other than zero.

    Attributes:
        offset: Start in the file.
        n_bytes: Length in bytes.
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

    @signals_wait()  # an open transaction would stop all later ones
    def erase(self) -> None:
        """Erase deleted rows from all files of the database.

        Raises:
            StoreError: Another process kept reading for ``PATIENCE_S``; the message names it.
            OSError: The disk failed.
            sqlite3.Error: The disk failed.
        """
        for _ in range(_MOST_TRIES):
            self._empty_log()
            self._db.execute("BEGIN IMMEDIATE")  # prevents writes, so pages stay as they are
            try:
                is_done = not self._log.exists() or self._log.stat().st_size == 0
                if is_done:
                    self._fill_gaps()
            finally:
                self._db.execute("ROLLBACK")
            if is_done:
                # SQLite's cached pages have the old bytes in their gaps, too.
                self._db.execute("PRAGMA shrink_memory")
                return
        raise StoreError(
            f"what was deleted cannot be erased from {self._path}: it is changed meanwhile."
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
        """Write zeros over the free space inside pages, which SQLite never reads."""
        # The file is kept open, because closing it would drop SQLite's locks on it.
        if self._file is None:
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
    # With auto_vacuum or in very large files, other pages can look like tree pages.
    if any(header[52:56]) or n_pages > _MOST_PAGES:
        raise StoreError("nothing can be erased from an SQLite file with auto_vacuum; copy it")
    for first in range(0, n_pages, _BLOCK_PAGES):
        block = os.pread(file, _BLOCK_PAGES * page_bytes, first * page_bytes)
        for at in range(0, len(block), page_bytes):
            page = block[at : at + usable]
            start, end = _gap(page, 0 if first or at else _FILE_HEADER)
            if page.count(0, start, end) < end - start:
                yield _Gap(first * page_bytes + at + start, end - start)


def _gap(page: bytes, at: int) -> tuple[int, int]:
    """Return start and end of the free space between a b-tree page's cell pointers and its cells.

    Return (0, 0) for other pages.
    """
    header_bytes = _TREE_PAGES.get(page[at])
    if header_bytes is None:
        return 0, 0
    n_cells, cells = struct.unpack_from(">HH", page, at + 3)
    start, end = at + header_bytes + 2 * n_cells, cells or 1 << 16
    return (start, end) if start < end <= len(page) else (0, 0)
