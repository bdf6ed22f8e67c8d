"""The slab's index: a SQLite database in WAL mode, with one transaction for each flush."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from llmaas_hooks.request_scope import MOST_NAME_BYTES
from llmaas_plugins.files.sqlite_erasing import Eraser, connect
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, KEY_BYTES, TOKEN_BYTES, ChunkId
from llmaas_plugins.kv_chunks.store.store_files import FILES
from llmaas_plugins.kv_chunks.store.store_format import FORMAT, read_only_uri

__all__ = ["STORE_ID_BYTES", "ChunkIndex", "ChunkRow", "IndexUpdate", "is_damage"]

STORE_ID_BYTES = 16

_SCHEMA = """
CREATE TABLE store (id BLOB NOT NULL);
CREATE TABLE geometry (root BLOB PRIMARY KEY, layout TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, tokens BLOB NOT NULL,
    offset INTEGER NOT NULL, size INTEGER NOT NULL, bits INTEGER NOT NULL,
    attention REAL NOT NULL, seen REAL NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE contexts (id TEXT PRIMARY KEY, head BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE writes (day INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
"""
_WRONG_TYPES = """
SELECT count(*) FROM chunks
WHERE typeof(key) || typeof(parent) || typeof(tokens) != 'blobblobblob'
   OR typeof(offset) || typeof(size) || typeof(used) != 'integerintegerinteger'
   OR typeof(bits) || typeof(attention) || typeof(seen) != 'integerrealreal'
   OR used NOT BETWEEN 0 AND 1 << 62
"""  # SQLite stores any type in any column and has no checksums
_MALFORMED = f"""
length(key) != {KEY_BYTES} OR length(parent) != {KEY_BYTES}
OR length(tokens) NOT BETWEEN {TOKEN_BYTES} AND {CHUNK_TOKENS * TOKEN_BYTES}
"""
_ERASING = 0x6C6C6D65
"""SQLite application id that marks an unfinished deletion: files may hold deleted contexts."""
_MAX_LAYOUT_BYTES = 1 << 20
_MOST_LAYOUTS = 1024
"""Most layouts, unless more of them belong to chunks; clients of a service choose the roots."""


class ChunkRow(NamedTuple):
    """Index entry of a chunk on disk.

    Attributes:
        id: Identity of the chunk.
        offset: Offset in the slab's extents, in bytes; -1 for a ghost.
        size: Bytes of the payload; 0 for a ghost.
        bits: Bits per value in the payload; 0 if the codec has no levels.
        attention: Summed attention that its tokens received.
        n_scores: Number of scores in that sum.
    """

    id: ChunkId
    offset: int
    size: int
    bits: int = 0
    attention: float = 0.0
    n_scores: float = 0.0


@dataclass(slots=True)
class IndexUpdate:
    """Changes of one transaction.

    Attributes:
        added: New or changed chunks, by key.
        removed: Keys of removed chunks; a key that is also in ``added`` was stored again.
        used: Keys of used chunks, least recently used first.
        heads: Key of the last chunk of every named context; None if no context changed.
        heads_before: Heads in the index before this update, of which only the changes are written;
            None if they are unknown.
        layouts: Newly learned layouts of cells, as JSON, by root.
        writes: Bytes written to the slab, in whole pages, by day (days since 1970).
        erases: Whether the bytes of removed chunks are to be erased; ``end_erasing`` confirms it.
    """

    added: dict[bytes, ChunkRow] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    used: dict[bytes, None] = field(default_factory=dict)
    heads: Mapping[str, bytes] | None = None
    heads_before: Mapping[str, bytes] | None = None
    layouts: dict[bytes, str] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    erases: bool = False

    def merged_with(self, later: IndexUpdate) -> IndexUpdate:
        """Return this update followed by ``later``, as one update."""
        gone = set(later.removed)
        return IndexUpdate(
            {key: row for key, row in self.added.items() if key not in gone} | later.added,
            self.removed + later.removed,
            {key: None for key in self.used if key not in later.used} | later.used,
            self.heads if later.heads is None else later.heads,
            self.heads_before if later.heads is None else later.heads_before,
            self.layouts | later.layouts,
            self.writes | later.writes,
            self.erases or later.erases,
        )


class ChunkIndex:
    """One SQLite file; use it from one thread at a time."""

    _tick: int | None = None

    def __init__(self, path: Path, new_store_id: bytes) -> None:
        """Open ``path``, or create it with mode 0600 for the store ``new_store_id``.

        Raises:
            sqlite3.DatabaseError: The index is damaged or has another format.
            StoreError: ``path``, or a file that SQLite keeps beside it, is not a regular file.
        """
        for suffix in ("-wal", "-shm", "-journal"):
            FILES.make_private(path.with_name(path.name + suffix))
        if not FILES.make_private(path):  # SQLite gives its other files the same mode
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if not self._open_writable(path, new_store_id):  # SQLite also opens read-only files
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # raise the system's own error
            if not self._open_writable(path, new_store_id):
                raise sqlite3.DatabaseError("index is damaged: SQLite opens it read-only")

    def _open_writable(self, path: Path, new_store_id: bytes) -> bool:
        self._db = connect(path)
        self._eraser = Eraser(self._db, path)
        try:
            self._begin(new_store_id)
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0)  # our own errors have none
            if code & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            return False
        return True

    @classmethod
    def read_only(cls, path: Path) -> Self:
        """Open an index read-only; another process may have it open.

        Raises:
            sqlite3.DatabaseError: The index is damaged, has another format, or does not exist.
            StoreError: ``path`` is not a regular file.
        """
        FILES.is_regular(path)
        self = cls.__new__(cls)
        self._db = connect(read_only_uri(path), uri=True)
        self._eraser = Eraser(self._db, path)
        self._begin(None)
        return self

    def _begin(self, new_store_id: bytes | None) -> None:
        self._db.text_factory = _text
        try:
            if new_store_id is not None:
                self._prepare(new_store_id)
            self._check()
        except UnicodeDecodeError as error:  # SQLite's own messages can fail to decode
            self._db.close()
            raise sqlite3.DatabaseError("index is damaged: schema is not UTF-8") from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, new_store_id: bytes) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA wal_autocheckpoint=256")  # 1 MiB: cgroups count its pages
        (n_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables == 0:
            with self._db:
                self._db.executescript("BEGIN;" + _SCHEMA)
                self._db.execute("INSERT INTO store VALUES (?)", (new_store_id,))
                self._db.execute(f"PRAGMA user_version={FORMAT}")
                self._db.execute("COMMIT")
        self._db.execute("DELETE FROM contexts WHERE 0")  # fails if the index is read-only

    def _check(self) -> None:
        self._db.execute("PRAGMA trusted_schema=OFF")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise sqlite3.DatabaseError(f"index format {version}, expected {FORMAT}")
        (problem,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        code = re.search(r"error code=(\d+)", problem)
        if code is not None and int(code[1]) & 0xFF == sqlite3.SQLITE_IOERR:
            raise sqlite3.OperationalError(f"index cannot be read: {problem}")  # may be temporary
        if problem != "ok":
            raise sqlite3.DatabaseError(f"index is damaged: {problem}")
        found = self._db.execute("SELECT sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*'")
        if {_normalized(sql) for (sql,) in found} != _STATEMENTS:  # refuses triggers and views
            raise sqlite3.DatabaseError("index is damaged: its tables are not those of a store")
        (n_odd,) = self._db.execute(_WRONG_TYPES).fetchone()
        if n_odd:
            raise sqlite3.DatabaseError(f"index is damaged: {n_odd} rows have wrong types")
        self.store_id()

    def store_id(self) -> bytes:
        """Return the store's id, which the slab's header must repeat."""
        values = self._db.execute("SELECT CAST(id AS BLOB) FROM store").fetchall()
        if len(values) != 1 or len(values[0][0]) != STORE_ID_BYTES:
            raise sqlite3.DatabaseError("index is damaged: it does not name its store")
        return values[0][0]

    def chunks(self) -> Iterable[ChunkRow]:
        """Yield the chunks whose fields have valid lengths, least recently used first."""
        rows = self._db.execute(
            "SELECT key, parent, tokens, offset, size, bits, attention, seen "  # noqa: S608  a constant
            f"FROM chunks WHERE NOT ({_MALFORMED}) ORDER BY used"
        )
        for key, parent, tokens, *rest in rows:
            yield ChunkRow(ChunkId(key, parent, tokens), *rest)

    def n_malformed(self) -> int:
        """Count the rows that ``chunks`` skips."""
        found = self._db.execute(f"SELECT count(*) FROM chunks WHERE {_MALFORMED}")  # noqa: S608
        return int(found.fetchone()[0])

    def drop_malformed(self) -> int:
        """Delete the rows that ``chunks`` skips; return how many there were."""
        n_rows = self.n_malformed()
        if n_rows:
            self._db.execute(f"DELETE FROM chunks WHERE {_MALFORMED}")  # noqa: S608
        return n_rows

    def contexts(self) -> dict[str, bytes]:
        """Return the key of each named context's last chunk."""
        rows = self._db.execute(
            "SELECT CAST(id AS BLOB), CAST(head AS BLOB) FROM contexts "
            "WHERE length(CAST(id AS BLOB)) <= ? AND length(CAST(head AS BLOB)) = ?",
            (MOST_NAME_BYTES, KEY_BYTES),
        )
        return {name.decode(errors="replace"): head for name, head in rows}

    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root``, as JSON, or None."""
        found = self._db.execute(
            "SELECT CAST(layout AS BLOB) FROM geometry "
            "WHERE root = ? AND length(CAST(layout AS BLOB)) <= ?",
            (root, _MAX_LAYOUT_BYTES),
        ).fetchone()
        return None if found is None else found[0].decode(errors="replace")

    def layouts(self) -> dict[bytes, str]:
        """Return the layout of the cells under each root, as JSON."""
        rows = self._db.execute(
            "SELECT CAST(root AS BLOB), CAST(layout AS BLOB) FROM geometry "
            "WHERE length(CAST(root AS BLOB)) = ? AND length(CAST(layout AS BLOB)) <= ?",
            (KEY_BYTES, _MAX_LAYOUT_BYTES),
        )
        return {root: layout.decode(errors="replace") for root, layout in rows}

    def written_on(self, day: int) -> int:
        """Return the bytes written to the slab on a day, given as days since 1970."""
        found = self._db.execute("SELECT CAST(bytes AS INTEGER) FROM writes WHERE day=?", (day,))
        return max([0, *(n_bytes for (n_bytes,) in found)])

    def apply(self, update: IndexUpdate) -> None:
        """Commit a set of changes."""
        db, tick = self._db, self._last_used()
        try:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("DELETE FROM chunks WHERE key=?", ((k,) for k in update.removed))
            db.executemany(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                ((*row.id, *row[1:], tick) for row in update.added.values()),
            )
            db.executemany(
                "UPDATE chunks SET used=? WHERE key=?",
                ((tick + 1 + i, key) for i, key in enumerate(update.used)),
            )
            if update.layouts:
                self._drop_unused_layouts()
            db.executemany("INSERT OR REPLACE INTO geometry VALUES (?, ?)", update.layouts.items())
            for day, n_bytes in update.writes.items():
                db.execute("DELETE FROM writes WHERE day < ?", (day,))
                db.execute("INSERT OR REPLACE INTO writes VALUES (?, ?)", (day, n_bytes))
            if update.heads is not None:
                self._write_heads(update.heads, update.heads_before)
            if update.erases:
                db.execute(f"PRAGMA application_id={_ERASING}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # BEGIN may fail, and SQLite ends it after some errors
                db.execute("ROLLBACK")
            raise
        self._tick = tick + len(update.used)

    def _last_used(self) -> int:
        """Return a time of use that no chunk exceeds; only the first call looks at all chunks."""
        if self._tick is None:
            found = self._db.execute("SELECT coalesce(max(used), 0) FROM chunks").fetchone()
            self._tick = int(found[0])
        return self._tick

    def _write_heads(self, heads: Mapping[str, bytes], before: Mapping[str, bytes] | None) -> None:
        """Write the heads that are others than before, or all."""
        changed = set(heads.items())
        if before is None:
            self._db.execute("DELETE FROM contexts")
        else:
            changed -= before.items()
            gone = ((name,) for name in before.keys() - heads.keys())
            self._db.executemany("DELETE FROM contexts WHERE id=?", gone)
        self._db.executemany("INSERT OR REPLACE INTO contexts VALUES (?, ?)", changed)

    def _drop_unused_layouts(self) -> None:
        """Delete the layouts of roots without chunks, if there are many layouts."""
        (n_layouts,) = self._db.execute("SELECT count(*) FROM geometry").fetchone()
        if n_layouts >= _MOST_LAYOUTS:
            self._db.execute("DELETE FROM geometry WHERE root NOT IN (SELECT parent FROM chunks)")

    def is_erasing(self) -> bool:
        """Return whether a deletion was begun and not confirmed by ``end_erasing``."""
        (mark,) = self._db.execute("PRAGMA application_id").fetchone()
        return bool(mark == _ERASING)

    def end_erasing(self) -> None:
        """Erase deleted rows from the index's files, and note that the deletion is complete.

        Raises:
            StoreError: Another process is still reading the log.
        """
        self._eraser.erase()
        if self.is_erasing():
            self._db.execute("PRAGMA application_id=0")

    def begin_snapshot(self) -> None:
        """Begin a read transaction, so that later commits stay invisible until ``close``."""
        self._db.execute("BEGIN")

    def vacuum(self) -> None:
        """Return free pages to the file system."""
        self._db.execute("VACUUM")

    def close(self) -> None:
        """Close the file; SQLite merges the write-ahead log into it."""
        self._db.close()
        self._eraser.close()


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the index file itself is bad, as opposed to the disk or its permissions."""
    is_schema = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError) and (
        is_schema or not isinstance(error, sqlite3.OperationalError)
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")  # SQLite does not check that text is UTF-8


def _normalized(sql: str | None) -> str:
    return " ".join((sql or "").split())


_STATEMENTS = {_normalized(sql) for sql in _SCHEMA.split(";") if sql.strip()}
