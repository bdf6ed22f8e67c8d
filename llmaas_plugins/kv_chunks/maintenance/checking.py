"""Find every defect of a store."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins._native import Status
from llmaas_plugins.kv_chunks.maintenance.snapshot import (
    StoreSnapshot,
    read_payloads,
    read_snapshot,
)
from llmaas_plugins.kv_chunks.store.chunk_reader import DEFECTS
from llmaas_plugins.kv_chunks.store.index import ChunkRow

__all__ = ["CheckResult", "Progress", "check_store"]

Progress = Callable[[Sequence[ChunkRow]], Iterable[ChunkRow]]
_RECHECK_S = 2.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of checking a store.

    Attributes:
        holder: Description of the process that uses the store, or None.
        n_chunks: Number of chunks that were checked.
        problems: One sentence for each defect.
    """

    holder: str | None
    n_chunks: int
    problems: list[str]


def check_store(directory: Path, progress: Progress = iter) -> CheckResult:
    """Read every chunk of a store, its index, and the slab's header.

    A store in use may change during the check. A chunk is reported only if it stays wrong.

    Args:
        directory: Directory of the store.
        progress: Wraps the iteration over the chunks, for a progress display.

    Raises:
        StoreError: There is no store, it has another format, or it cannot be read at all.
    """
    try:
        snapshot = read_snapshot(directory)
    except sqlite3.DatabaseError as error:
        return CheckResult(None, 0, [f"the index cannot be used: {error}"])
    problems = (
        [] if snapshot.has_matching_slab else ["the slab's header does not belong to the index"]
    )
    if snapshot.n_invalid_rows:
        problems.append(f"invalid rows in the index: {snapshot.n_invalid_rows}")
    damaged = _damaged(snapshot, progress) if snapshot.has_matching_slab else {}
    problems += [
        f"chunk {_short(key)}: {DEFECTS.get(status, status.name)}"
        for key, status in damaged.items()
    ]
    gone = [row for row in snapshot.rows.values() if not snapshot.is_reachable(row)]
    problems += [f"chunk {_short(row.id.key)}: the chunk before it is missing" for row in gone]
    problems += [
        f"context {name!r}: its last chunk is missing"
        for name, head in snapshot.contexts.items()
        if head not in snapshot.rows
    ]
    return CheckResult(snapshot.holder, len(snapshot.rows), problems)


def _damaged(snapshot: StoreSnapshot, progress: Progress) -> dict[bytes, Status]:
    by_place = sorted(snapshot.rows.values(), key=lambda row: row.offset)
    wrong = _verified(snapshot, progress(by_place))
    deadline = time.monotonic() + (_RECHECK_S if snapshot.holder else 0)
    while wrong:  # a chunk may have been rewritten or moved since the index was read
        now = _reread(snapshot)
        still = [row for key in wrong if (row := now.get(key)) == snapshot.rows[key]]
        wrong = _verified(snapshot, [row for row in still if row is not None])
        if time.monotonic() >= deadline:
            break
        time.sleep(_RECHECK_S / 10)
    return wrong


def _reread(snapshot: StoreSnapshot) -> dict[bytes, ChunkRow]:
    try:
        return dict(read_snapshot(snapshot.directory).rows)
    except (StoreError, sqlite3.DatabaseError):
        return dict(snapshot.rows)


def _verified(snapshot: StoreSnapshot, rows: Iterable[ChunkRow]) -> dict[bytes, Status]:
    found = read_payloads(snapshot.directory, rows)
    return {row.id.key: status for row, status, _ in found if status != Status.OK}


def _short(key: bytes) -> str:
    return key.hex()[:12]
