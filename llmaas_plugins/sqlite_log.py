"""SQLite's write-ahead log, emptied so that what was deleted is in no file any more."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.store_lock import readers

__all__ = ["PATIENCE_S", "connect", "empty_log"]

PATIENCE_S = 5.0
"""How long a statement waits for other connections; then it fails."""


def connect(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Open a database that may hold texts: deleted rows are overwritten, nothing goes to /tmp."""
    db = sqlite3.connect(
        database, PATIENCE_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    try:
        db.execute("PRAGMA secure_delete=ON")
        db.execute("PRAGMA temp_store=MEMORY")
    except BaseException:
        db.close()
        raise
    return db


def empty_log(db: sqlite3.Connection, path: Path) -> None:
    """Fold the log of the database at ``path`` into it, and truncate the log.

    Raises:
        StoreError: Somebody went on reading for ``PATIENCE_S``; the message says who.
        sqlite3.Error: The disk failed.
    """
    (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_busy:
        who = ", ".join(readers(path)) or "another process"
        raise StoreError(
            f"what was deleted cannot be erased from {path} yet: {who} has been reading it for "
            f"{PATIENCE_S:g} s. Stop that, then delete again."
        )
