"""The sums of every day and context, in one SQLite file that several processes may share."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "Ledger"]

COLUMNS = ("requests", "prompt", "reused", "evaluated", "generated", "first_token_s", "total_s")
_TABLE = f"""
    CREATE TABLE IF NOT EXISTS usage (
        day TEXT, context TEXT, {", ".join(COLUMNS)}, PRIMARY KEY (day, context)
    ) WITHOUT ROWID"""
_ADD = f"""
    INSERT INTO usage VALUES (?, ?, {", ".join("?" for _ in COLUMNS)})
    ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in COLUMNS)}
"""


class Ledger:
    """Each booking is one transaction: a killed process loses no other, and halves none."""

    def __init__(self, directory: Path) -> None:
        """Open ``usage.sqlite`` in ``directory``, which is made if need be."""
        directory = directory.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            directory / "usage.sqlite", timeout=10, isolation_level=None, check_same_thread=False
        )
        self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {_TABLE}")

    def add(self, day: str, context: str, **amounts: float) -> None:
        """Add ``amounts``, one for each of ``COLUMNS``."""
        self._rows(_ADD, day, context, *[amounts[name] for name in COLUMNS])

    def evaluated(self, day: str) -> int:
        """Tokens that were evaluated that day, by all processes that share the file."""
        return int(self._rows("SELECT sum(evaluated) FROM usage WHERE day = ?", day)[0][0] or 0)

    def contexts(self, day: str, limit: int = 20) -> dict[str, dict[str, float]]:
        """That day's sums by context, those that had most evaluated first."""
        rows = self._rows(
            f"SELECT context, {', '.join(COLUMNS)} FROM usage WHERE day = ? "
            "ORDER BY evaluated DESC LIMIT ?",
            day,
            limit,
        )
        return {name: dict(zip(COLUMNS, sums, strict=True)) for name, *sums in rows}

    def forget_before(self, day: str) -> None:
        """Delete the days before ``day``."""
        self._rows("DELETE FROM usage WHERE day < ?", day)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()
