"""Texts of the contexts, kept in memory and on disk, while their KV may come and go (LLMS Fig. 4c).

A context is its messages. They are committed before a call returns, so every completed call
survives a kill of the process at any moment. KV that did not reach the disk is recomputed.

A deletion begins with one commit, which removes the text and records the context's name. The name
is removed when no file has the text any more and the KV is gone. Until then, the next service that
finds the name finishes the deletion. If the context may have KV, and no plugin of that service can
erase it, the name waits for a service whose plugin can.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmaas_hooks import StoreError, forks
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.files.sqlite_erasing import Eraser, connect

__all__ = ["ContextLog", "ContextRecord", "read_log"]

_FILE = "contexts.sqlite"
_TICK_S = 1e-6  # a few times the resolution of a float at today's Unix time
_CHANGES = (  # statements that upgrade each format to the next
    (
        "CREATE TABLE contexts ("
        "id TEXT PRIMARY KEY, app TEXT NOT NULL, messages TEXT NOT NULL, "
        "n_tokens INTEGER NOT NULL, n_calls INTEGER NOT NULL, "
        "created REAL NOT NULL, used REAL NOT NULL) WITHOUT ROWID",
        "CREATE INDEX contexts_by_app ON contexts (app, used)",
    ),
    ("ALTER TABLE contexts ADD COLUMN seen_from INTEGER NOT NULL DEFAULT 0",),
    ("CREATE TABLE deletions (id TEXT PRIMARY KEY, app TEXT NOT NULL) WITHOUT ROWID",),
    ("ALTER TABLE deletions ADD COLUMN has_text INTEGER NOT NULL DEFAULT 1",),
    (
        "ALTER TABLE contexts ADD COLUMN has_kv INTEGER NOT NULL DEFAULT 1",
        "ALTER TABLE deletions ADD COLUMN has_kv INTEGER NOT NULL DEFAULT 1",
    ),
)
_FORMAT = len(_CHANGES)
_ERASING_FORMAT = 3
"""First format without leftovers: files of earlier formats may hold deleted texts in free pages."""
_COLUMNS = (  # queries that work in files of each format and the later ones
    (1, "SELECT id, app, messages, n_tokens, n_calls, created, used FROM contexts LIMIT 0"),
    (2, "SELECT seen_from FROM contexts LIMIT 0"),
    (3, "SELECT id, app FROM deletions LIMIT 0"),
    (4, "SELECT has_text FROM deletions LIMIT 0"),
    (5, "SELECT contexts.has_kv, deletions.has_kv FROM contexts, deletions LIMIT 0"),
)


@dataclass(slots=True)
class ContextRecord:
    """One persistent context.

    Attributes:
        id: Id that is unique over all apps.
        app: App that the context belongs to.
        messages: OpenAI-style ``{"role", "content"}`` messages in order.
        n_tokens: Tokens in the context's cells after the last call.
        n_calls: Calls completed.
        created: Unix time of creation.
        used: Unix time of the last completed call.
        seen_from: Index of the first message that the model sees besides the system prompt.
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
        """Return everything except the messages, as plain JSON types."""
        return {key: value for key, value in asdict(self).items() if key != "messages"}


_abandoned: list[object] = []
"""Objects that children inherited; they must never be closed, or SQLite would write."""


class ContextLog(forks.Forked):
    """The SQLite file of contexts, mode 0600; thread-safe, and closed in a forked child."""

    def __init__(self, directory: Path) -> None:
        """Open or create ``contexts.sqlite`` in ``directory``.

        Raises:
            StoreError: The file cannot be opened, is damaged, or has another format. It is
                unchanged.
        """
        self._lock = forks.lock()  # reentrant: a generator collected meanwhile may query the log
        path = directory.expanduser().absolute() / _FILE
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
        forks.watch(self)

    def now(self, app: str) -> float:
        """Return the time, made later than any use of the app's contexts if the clock went back."""
        query = "SELECT max(used) FROM contexts WHERE app=?"
        with self._opened() as db:
            (latest,) = db.execute(query, (app,)).fetchone()
        return max(time.time(), (latest or 0.0) + _TICK_S)

    def get(self, context_id: str, app: str) -> ContextRecord | None:
        """Return the app's context named ``context_id``, or None, even if another app has it."""
        rows = self._rows("SELECT * FROM contexts WHERE id=? AND app=?", context_id, app)
        return rows[0] if rows else None

    def lacks(self, context_id: str) -> bool:
        """Return whether the context was deleted; False if the log is closed and cannot tell."""
        with contextlib.suppress(StoreError):
            return not self._count("SELECT count(*) FROM contexts WHERE id=?", context_id)
        return False

    def of_app(self, app: str) -> list[ContextRecord]:
        """Return an app's contexts, most recently used first."""
        return self._rows("SELECT * FROM contexts WHERE app=? ORDER BY used DESC", app)

    def latest(self, app: str | None, most: int) -> list[ContextRecord]:
        """Return contexts of an app, or of all apps, without messages, the latest used first."""
        query = (
            "SELECT id, app, '[]', n_tokens, n_calls, created, used, seen_from FROM contexts "
            "WHERE app=? OR ? IS NULL ORDER BY used DESC LIMIT ?"
        )
        return self._rows(query, app, app, most)

    def n_contexts(self, app: str | None) -> int:
        """Return the number of contexts of an app, or of all apps."""
        return self._count("SELECT count(*) FROM contexts WHERE app=? OR ? IS NULL", app, app)

    def of_all(self) -> list[ContextRecord]:
        """Return every app's contexts, oldest first."""
        return self._rows("SELECT * FROM contexts ORDER BY created")

    def add(self, record: ContextRecord, most: int) -> bool:
        """Insert a context unless its app has ``most`` already; return whether it was inserted."""
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
            "INSERT INTO contexts SELECT ?,?,?,?,?,?,?,?,0 "
            "WHERE (SELECT count(*) FROM contexts WHERE app=?) < ?",
            *values,
            record.app,
            most,
        )

    def update(self, record: ContextRecord) -> bool:
        """Commit what a call changed in a context; return False if the context was deleted."""
        return self._change(
            "UPDATE contexts SET messages=?, n_tokens=?, n_calls=?, used=?, seen_from=? WHERE id=?",
            _as_json(record.messages),
            record.n_tokens,
            record.n_calls,
            record.used,
            record.seen_from,
            record.id,
        )

    def expect_kv(self, context_id: str) -> None:
        """Record that a plugin may store KV of a context from now on."""
        self._change("UPDATE contexts SET has_kv=1 WHERE id=? AND NOT has_kv", context_id)

    def delete(self, context_id: str, app: str) -> bool:
        """Begin to delete an app's context; return False if there is no text of it to erase.

        From now on no call finds the context. The caller must call ``erase`` and ``end_deletion``.
        """
        name = (context_id, app)
        with self._opened() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.execute(
                    "INSERT OR IGNORE INTO deletions (id, app, has_kv) "
                    "SELECT id, app, has_kv FROM contexts WHERE id=? AND app=?",
                    name,
                )
                db.execute("DELETE FROM contexts WHERE id=? AND app=?", name)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            query = "SELECT 1 FROM deletions WHERE id=? AND app=? AND has_text"
            rows = db.execute(query, name)
            return rows.fetchone() is not None

    def deletions(self, *, with_kv: bool = True) -> list[str]:
        """Return the names of contexts whose deletion has begun but not ended.

        Args:
            with_kv: Whether to include contexts of which only KV may be left.
        """
        query = "SELECT id FROM deletions WHERE has_text OR ?"
        with self._opened() as db:
            return [name for (name,) in db.execute(query, (with_kv,))]

    def erase(self) -> None:
        """Erase every byte of deleted texts from all files.

        Raises:
            StoreError: Another process keeps reading the file, or the disk failed.
        """
        with self._opened():
            self._eraser.erase()

    def leave_deletion(self, context_id: str) -> None:
        """Record that a context's text is erased; keep its name if KV may be in a closed store."""
        self._change("UPDATE deletions SET has_text=0 WHERE id=?", context_id)
        self._change("DELETE FROM deletions WHERE id=? AND NOT has_kv", context_id)

    def end_deletion(self, context_id: str) -> None:
        """Record that nothing of a context is left."""
        self._change("DELETE FROM deletions WHERE id=?", context_id)

    def close(self) -> None:
        """Close the file; nothing can be read or changed after that."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._eraser.close()
            self._db = None

    def after_fork(self, *, in_child: bool) -> None:
        """Abandon the file in a child, without closing it."""
        if in_child and self._db is not None:
            _abandoned.extend((self._db, self._eraser))
            self._db = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Lend the database under the lock; all access goes through here.

        Raises:
            StoreError: The log is closed; or the disk is full or fails, and nothing was changed.
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
                    f"cannot use the contexts in {self._path}: {error}. Free space on its disk, or "
                    "make sure that it is writable."
                ) from error

    def _change(self, statement: str, *arguments: object) -> bool:
        with self._opened() as db:
            return db.execute(statement, arguments).rowcount > 0

    def _count(self, query: str, *arguments: str | None) -> int:
        with self._opened() as db:
            (n,) = db.execute(query, arguments).fetchone()
        return int(n)

    def _rows(self, query: str, *arguments: object) -> list[ContextRecord]:
        with self._opened() as db:
            rows = db.execute(query, arguments).fetchall()
        return [ContextRecord(row[0], row[1], parse_json(row[2]), *row[3:8]) for row in rows]


def read_log(directory: Path) -> list[ContextRecord]:
    """Return all contexts of a service, which may be running.

    Raises:
        StoreError: The directory has no contexts, or they cannot be read.
    """
    if not (directory.expanduser() / _FILE).is_file():
        raise StoreError(
            f"{directory} has no contexts of a service. Give the service's service.state_dir."
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
        db.execute("PRAGMA journal_mode=WAL")  # changes the file, so only after the check
        db.execute("PRAGMA synchronous=NORMAL")
        if 0 < _version(db) < _ERASING_FORMAT:
            db.execute("VACUUM")
        _bring_up_to_date(db)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # skipped if another process reads the file
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection) -> None:
    """Raise an error unless the database is empty, or intact and in one of our formats."""
    version = _version(db)
    (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if n_tables == version == 0:
        return
    if not 0 < version <= _FORMAT:
        raise sqlite3.DatabaseError(f"it has format {version}, expected {_FORMAT}")
    for since, query in _COLUMNS:
        if version >= since:
            db.execute(query)
    (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {problem}")


def _bring_up_to_date(db: sqlite3.Connection) -> None:
    """Upgrade the file to our format, completely or not at all; older programs then refuse it."""
    if _version(db) == _FORMAT:
        return
    db.execute("BEGIN IMMEDIATE")
    for change in _CHANGES[_version(db) :]:  # read again: another process may have upgraded it
        for statement in change:
            db.execute(statement)
    db.execute(f"PRAGMA user_version={_FORMAT}")
    db.execute("COMMIT")


def _version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def _as_json(messages: list[dict[str, str]]) -> str:
    return json.dumps(messages, ensure_ascii=False)
