"""The contexts' texts: memory-resident and durable, while their KV may come and go (LLMS Fig. 4c).

A context is its messages. They are committed before a call returns, so a process killed at any
moment comes back with every completed call; KV that did not make it to disk is recomputed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["ContextLog", "ContextRecord"]

_FORMAT = 1
_SCHEMA = """
CREATE TABLE contexts (
    id TEXT PRIMARY KEY, app TEXT NOT NULL, messages TEXT NOT NULL,
    n_tokens INTEGER NOT NULL, n_calls INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX contexts_by_app ON contexts (app, used);
"""


@dataclass(slots=True)
class ContextRecord:
    """One persistent context.

    Attributes:
        id: Unique over all apps.
        app: The app it belongs to.
        messages: OpenAI-style ``{"role", "content"}`` in order.
        n_tokens: Tokens in its cells after the last call.
        n_calls: Calls completed.
        created: Unix time.
        used: Unix time of the last completed call.
    """

    id: str
    app: str
    messages: list[dict[str, str]] = field(default_factory=list)
    n_tokens: int = 0
    n_calls: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)

    def summary(self) -> dict[str, object]:
        """Everything but the messages, as plain JSON types."""
        return {key: value for key, value in asdict(self).items() if key != "messages"}


class ContextLog:
    """One SQLite file, mode 0600. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Open or create ``contexts.sqlite`` in ``directory``.

        Raises:
            StoreError: It cannot be opened, is damaged or of another format; nothing was changed.
        """
        self._lock = threading.Lock()
        path = directory.expanduser() / "contexts.sqlite"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._prepare(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot use the contexts in {path}: {error}. "
                "Set service.state_dir to another directory, or repair the file with sqlite3."
            ) from error

    def _prepare(self, path: Path) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (n_tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={_FORMAT};COMMIT;")
        elif version != _FORMAT:
            raise sqlite3.DatabaseError(f"{path.name} has format {version}, expected {_FORMAT}")

    def get(self, context_id: str) -> ContextRecord | None:
        """The context named ``context_id``."""
        rows = self._rows("SELECT * FROM contexts WHERE id=?", context_id)
        return rows[0] if rows else None

    def of_app(self, app: str) -> list[ContextRecord]:
        """An app's contexts, most recently used first."""
        return self._rows("SELECT * FROM contexts WHERE app=? ORDER BY used DESC", app)

    def put(self, record: ContextRecord) -> None:
        """Insert or replace a context; committed when this returns."""
        values = (
            record.id,
            record.app,
            json.dumps(record.messages, ensure_ascii=False),
            record.n_tokens,
            record.n_calls,
            record.created,
            record.used,
        )
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO contexts VALUES (?,?,?,?,?,?,?)", values)

    def delete(self, context_id: str) -> None:
        """Remove a context."""
        with self._lock:
            self._db.execute("DELETE FROM contexts WHERE id=?", (context_id,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _rows(self, query: str, *arguments: str) -> list[ContextRecord]:
        with self._lock:
            rows = self._db.execute(query, arguments).fetchall()
        return [ContextRecord(row[0], row[1], json.loads(row[2]), *row[3:]) for row in rows]
