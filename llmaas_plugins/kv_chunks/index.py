"""The table of contents of the slab: SQLite in WAL mode, one transaction a flush."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llmaas_plugins.kv_chunks.keys import ChunkId

__all__ = ["STORE_ID_BYTES", "ChunkIndex", "ChunkRow", "IndexUpdate"]

STORE_ID_BYTES = 16

_SCHEMA = """
CREATE TABLE store (id BLOB NOT NULL);
CREATE TABLE geometry (root BLOB PRIMARY KEY, layout TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, tokens BLOB NOT NULL,
    offset INTEGER NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE contexts (id TEXT PRIMARY KEY, head BLOB NOT NULL) WITHOUT ROWID;
"""
_ODD_ROWS = """
SELECT count(*) FROM chunks
WHERE typeof(key) || typeof(parent) || typeof(tokens) != 'blobblobblob'
   OR typeof(offset) || typeof(size) || typeof(used) != 'integerintegerinteger'
   OR used NOT BETWEEN 0 AND 1 << 62
"""  # SQLite stores any type in any column, and has no checksums


class ChunkRow(NamedTuple):
    """A chunk on disk.

    Attributes:
        id: Its identity.
        offset: Its place in the slab's extents.
        size: Payload bytes.
    """

    id: ChunkId
    offset: int
    size: int


@dataclass(slots=True)
class IndexUpdate:
    """What a transaction changes.

    Attributes:
        added: New chunks by key.
        removed: Keys of chunks that are gone; a key that is also in ``added`` came back.
        used: Keys in the order of their last use, oldest first.
        heads: All named contexts, or None when they did not change.
    """

    added: dict[bytes, ChunkRow] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    used: dict[bytes, None] = field(default_factory=dict)
    heads: Mapping[str, bytes] | None = None

    def then(self, later: IndexUpdate) -> IndexUpdate:
        """Both changes as one."""
        gone = set(later.removed)
        return IndexUpdate(
            {key: row for key, row in self.added.items() if key not in gone} | later.added,
            self.removed + later.removed,
            {key: None for key in self.used if key not in later.used} | later.used,
            self.heads if later.heads is None else later.heads,
        )


class ChunkIndex:
    """One SQLite file. Call it from one thread at a time."""

    FORMAT = 1

    def __init__(self, path: Path, new_store_id: bytes) -> None:
        """Open ``path``, or create it for the store ``new_store_id``.

        Raises:
            sqlite3.DatabaseError: It is damaged, or of another format.
        """
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(new_store_id)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, new_store_id: bytes) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (n_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables == 0:
            with self._db:
                self._db.executescript("BEGIN;" + _SCHEMA)
                self._db.execute("INSERT INTO store VALUES (?)", (new_store_id,))
                self._db.execute(f"PRAGMA user_version={self.FORMAT}")
                self._db.execute("COMMIT")
        elif version != self.FORMAT:
            raise sqlite3.DatabaseError(f"index format {version}, expected {self.FORMAT}")
        (problem,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(f"index is damaged: {problem}")
        for columns in ("id, head FROM contexts", "root, layout FROM geometry"):
            self._db.execute(f"SELECT {columns} LIMIT 1")  # fails when there are others
        (n_odd,) = self._db.execute(_ODD_ROWS).fetchone()
        if n_odd:
            raise sqlite3.DatabaseError(f"index is damaged: {n_odd} rows of other types")
        self.store_id()

    def store_id(self) -> bytes:
        """The identity that the slab's header must repeat."""
        values = self._db.execute("SELECT CAST(id AS BLOB) FROM store").fetchall()
        if len(values) != 1 or len(values[0][0]) != STORE_ID_BYTES:
            raise sqlite3.DatabaseError("index is damaged: it does not name its store")
        return values[0][0]

    def chunks(self) -> Iterable[ChunkRow]:
        """Every chunk, least recently used first."""
        rows = self._db.execute(
            "SELECT key, parent, tokens, offset, size FROM chunks ORDER BY used"
        )
        for key, parent, tokens, offset, size in rows:
            yield ChunkRow(ChunkId(key, parent, tokens), offset, size)

    def contexts(self) -> dict[str, bytes]:
        """Key of each named context's last chunk."""
        rows = self._db.execute("SELECT CAST(id AS BLOB), head FROM contexts")
        return {name.decode(errors="replace"): head for name, head in rows}

    def geometry(self, root: bytes) -> str | None:
        """Layout of the cells under ``root``, as JSON."""
        found = self._db.execute("SELECT CAST(layout AS BLOB) FROM geometry WHERE root=?", (root,))
        row = found.fetchone()
        return row[0].decode(errors="replace") if row else None

    def set_geometry(self, root: bytes, layout: str) -> None:
        """Remember the layout of the cells under ``root``."""
        self._db.execute("INSERT OR REPLACE INTO geometry VALUES (?, ?)", (root, layout))

    def apply(self, update: IndexUpdate) -> None:
        """Commit a set of changes."""
        db = self._db
        (tick,) = db.execute("SELECT coalesce(max(used), 0) FROM chunks").fetchone()
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany("DELETE FROM chunks WHERE key=?", ((k,) for k in update.removed))
            db.executemany(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?)",
                ((*row.id, row.offset, row.size, tick) for row in update.added.values()),
            )
            db.executemany(
                "UPDATE chunks SET used=? WHERE key=?",
                ((tick + 1 + i, key) for i, key in enumerate(update.used)),
            )
            if update.heads is not None:
                db.execute("DELETE FROM contexts")
                db.executemany("INSERT INTO contexts VALUES (?, ?)", update.heads.items())
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some errors end it themselves
                db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file; the WAL is folded in."""
        self._db.close()
