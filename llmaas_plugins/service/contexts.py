"""The contexts' texts: memory-resident and durable, while their KV may come and go (LLMS Fig. 4c).

A context is its messages. They are committed before a call returns, so a process killed at any
moment comes back with every completed call; KV that did not make it to disk is recomputed.

A deletion begins with one commit, which removes the text and notes the context's name. The name
goes when the text is in no file any more, and the KV is gone; whoever finds one finishes that.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.json_text import parse_json
from llmaas_plugins.sqlite_erasing import Eraser, connect

__all__ = ["ContextLog", "ContextRecord", "read_log"]

_FILE = "contexts.sqlite"
_TICK_S = 1e-6  # a few times what a float can tell apart at today's date
_CHANGES = (  # what each format adds to the one before
    (
        "CREATE TABLE contexts ("
        "id TEXT PRIMARY KEY, app TEXT NOT NULL, messages TEXT NOT NULL, "
        "n_tokens INTEGER NOT NULL, n_calls INTEGER NOT NULL, "
        "created REAL NOT NULL, used REAL NOT NULL) WITHOUT ROWID",
        "CREATE INDEX contexts_by_app ON contexts (app, used)",
    ),
    ("ALTER TABLE contexts ADD COLUMN seen_from INTEGER NOT NULL DEFAULT 0",),
    ("CREATE TABLE deletions (id TEXT PRIMARY KEY, app TEXT NOT NULL) WITHOUT ROWID",),
)
_FORMAT = len(_CHANGES)
_ERASING_FORMAT = 3
"""Files of formats before may hold deleted texts in their free pages."""


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
        seen_from: The first message that the model sees, besides the system prompt.
    """

    id: str
    app: str
    messages: list[dict[str, str]] = field(default_factory=list)
    n_tokens: int = 0
    n_calls: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    seen_from: int = 0

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
        self._lock = threading.RLock()  # a generator may be collected, and ask, in the middle of it
        path = directory.expanduser() / _FILE
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)  # SQLite gives its other files the same mode
            finally:
                os.close(fd)
            self._path = path
            self._db: sqlite3.Connection | None = _connect(path)
            self._eraser = Eraser(self._db, path)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot use the contexts in {path}: {error}. "
                "Set service.state_dir to another directory, or repair the file with sqlite3."
            ) from error

    def now(self, app: str) -> float:
        """The time, later than any use of the app's contexts even if clocks were set back."""
        query = "SELECT max(used) FROM contexts WHERE app=?"
        with self._opened() as db:
            (latest,) = db.execute(query, (app,)).fetchone()
        return max(time.time(), (latest or 0.0) + _TICK_S)

    def get(self, context_id: str, app: str) -> ContextRecord | None:
        """The app's context named ``context_id``; another app's is not looked at."""
        rows = self._rows("SELECT * FROM contexts WHERE id=? AND app=?", context_id, app)
        return rows[0] if rows else None

    def lacks(self, context_id: str) -> bool:
        """Whether the context was deleted; a closed log cannot tell, and says no."""
        with contextlib.suppress(StoreError):
            return not self._count("SELECT count(*) FROM contexts WHERE id=?", context_id)
        return False

    def of_app(self, app: str) -> list[ContextRecord]:
        """An app's contexts, most recently used first."""
        return self._rows("SELECT * FROM contexts WHERE app=? ORDER BY used DESC", app)

    def of_all(self) -> list[ContextRecord]:
        """Every app's contexts, oldest first."""
        return self._rows("SELECT * FROM contexts ORDER BY created")

    def add(self, record: ContextRecord, most: int) -> bool:
        """Insert a context unless its app has ``most`` already; whether it was inserted."""
        values = (
            record.id,
            record.app,
            _as_json(record.messages),
            record.n_tokens,
            record.n_calls,
            record.created,
            record.used,
            record.seen_from,
        )
        return self._change(
            "INSERT INTO contexts SELECT ?,?,?,?,?,?,?,? "
            "WHERE (SELECT count(*) FROM contexts WHERE app=?) < ?",
            *values,
            record.app,
            most,
        )

    def update(self, record: ContextRecord) -> bool:
        """Replace what a call changed, committed when this returns; False if it was deleted."""
        return self._change(
            "UPDATE contexts SET messages=?, n_tokens=?, n_calls=?, used=?, seen_from=? WHERE id=?",
            _as_json(record.messages),
            record.n_tokens,
            record.n_calls,
            record.used,
            record.seen_from,
            record.id,
        )

    def delete(self, context_id: str, app: str) -> bool:
        """Begin to delete an app's context; False if it has none, nor one half deleted.

        No call finds the context any more. ``erase`` and ``end_deletion`` are due.
        """
        name = (context_id, app)
        with self._opened() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                found = db.execute("DELETE FROM contexts WHERE id=? AND app=?", name)
                if found.rowcount:
                    db.execute("INSERT OR IGNORE INTO deletions VALUES (?, ?)", name)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            rows = db.execute("SELECT 1 FROM deletions WHERE id=? AND app=?", name)
            return rows.fetchone() is not None

    def deletions(self) -> list[str]:
        """Names of the contexts whose deletion has not ended."""
        with self._opened() as db:
            return [name for (name,) in db.execute("SELECT id FROM deletions")]

    def erase(self) -> None:
        """Leave no byte of deleted texts in any file.

        Raises:
            StoreError: Another process goes on reading the file, or the disk failed.
        """
        with self._opened():
            self._eraser.erase()

    def end_deletion(self, context_id: str) -> None:
        """Note that nothing of a context is left."""
        self._change("DELETE FROM deletions WHERE id=?", context_id)

    def close(self) -> None:
        """Close the file; nothing can be read or changed after that."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._eraser.close()
            self._db = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Lend the database; the only way to it.

        Raises:
            StoreError: It was closed; or the disk is full or fails, and the change is not made.
        """
        with self._lock:
            if self._db is None:
                raise StoreError("this service was closed; open another one on the same state_dir")
            try:
                yield self._db
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, StoreError):
                    raise
                raise StoreError(
                    f"cannot use the contexts in {self._path}: {error}. Make room on its disk, or "
                    "see that it can be written."
                ) from error

    def _change(self, statement: str, *arguments: object) -> bool:
        with self._opened() as db:
            return db.execute(statement, arguments).rowcount > 0

    def _count(self, query: str, *arguments: str) -> int:
        with self._opened() as db:
            (n,) = db.execute(query, arguments).fetchone()
        return int(n)

    def _rows(self, query: str, *arguments: str) -> list[ContextRecord]:
        with self._opened() as db:
            rows = db.execute(query, arguments).fetchall()
        return [ContextRecord(row[0], row[1], parse_json(row[2]), *row[3:]) for row in rows]


def read_log(directory: Path) -> list[ContextRecord]:
    """The contexts of a service, which may run meanwhile.

    Raises:
        StoreError: There are none, or they cannot be read.
    """
    if not (directory.expanduser() / _FILE).is_file():
        raise StoreError(
            f"there are no contexts of a service in {directory}. Name its service.state_dir."
        )
    log = ContextLog(directory)
    try:
        return log.of_all()
    finally:
        log.close()


def _connect(path: Path) -> sqlite3.Connection:
    db = connect(path)
    try:
        _check(db)
        db.execute("PRAGMA journal_mode=WAL")  # changes the file, so not before it was checked
        db.execute("PRAGMA synchronous=NORMAL")
        if 0 < _version(db) < _ERASING_FORMAT:
            db.execute("VACUUM")
        _bring_up_to_date(db)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # unless somebody reads; `erase` insists
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection) -> None:
    """An error if the database is neither empty nor sound and ours."""
    version = _version(db)
    (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if n_tables == version == 0:
        return
    if not 0 < version <= _FORMAT:
        raise sqlite3.DatabaseError(f"it has format {version}, expected {_FORMAT}")
    db.execute("SELECT id, app, messages, n_tokens, n_calls, created, used FROM contexts LIMIT 0")
    if version > 1:
        db.execute("SELECT seen_from FROM contexts LIMIT 0")
    if version >= _ERASING_FORMAT:
        db.execute("SELECT id, app FROM deletions LIMIT 0")
    (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {problem}")


def _bring_up_to_date(db: sqlite3.Connection) -> None:
    """From the file's format to ours, all of it or nothing; an older program refuses it then."""
    if _version(db) == _FORMAT:
        return
    db.execute("BEGIN IMMEDIATE")
    for change in _CHANGES[_version(db) :]:  # another process may have been faster
        for statement in change:
            db.execute(statement)
    db.execute(f"PRAGMA user_version={_FORMAT}")
    db.execute("COMMIT")


def _version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def _as_json(messages: list[dict[str, str]]) -> str:
    return json.dumps(messages, ensure_ascii=False)
