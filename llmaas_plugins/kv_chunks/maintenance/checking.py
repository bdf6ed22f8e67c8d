"""Find every defect of a store."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins._native import Status
from llmaas_plugins.kv_chunks.maintenance.snapshot import Contents, payloads, read_contents
from llmaas_plugins.kv_chunks.store.index import ChunkRow

__all__ = ["Checked", "Progress", "check_store"]

Progress = Callable[[Sequence[ChunkRow]], Iterable[ChunkRow]]
_PATIENCE_S = 2.0
_WHAT = {
    Status.ECORRUPT: "its bytes are damaged",
    Status.ESTALE: "another chunk is stored in its place",
    Status.EIO: "it cannot be read",
    Status.EUNSUPPORTED: "its format is unknown",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of checking a store.

    Attributes:
        holder: Description of the process that uses the store, or None.
        n_chunks: Number of chunks that were checked.
        problems: One sentence for each defect.
    """

    holder: str | None
    n_chunks: int
    problems: list[str]


def check_store(directory: Path, progress: Progress = iter) -> Checked:
    """Read every chunk of a store, its index, and the slab's header.

    A store in use may change during the check. A chunk is reported only if it stays wrong.

    Args:
        directory: Directory of the store.
        progress: Wraps the iteration over the chunks, for a progress display.

    Raises:
        StoreError: There is no store, it has another format, or it cannot be read at all.
    """
    try:
        contents = read_contents(directory)
    except sqlite3.DatabaseError as error:
        return Checked(None, 0, [f"the index cannot be used: {error}"])
    problems = [] if contents.is_slab else ["the slab's header does not belong to the index"]
    if contents.unsound:
        problems.append(f"invalid rows in the index: {contents.unsound}")
    damaged = _damaged(contents, progress) if contents.is_slab else {}
    problems += [
        f"chunk {_short(key)}: {_WHAT.get(status, status.name)}" for key, status in damaged.items()
    ]
    gone = [row for row in contents.rows.values() if not contents.is_reachable(row)]
    problems += [f"chunk {_short(row.id.key)}: the chunk before it is missing" for row in gone]
    problems += [
        f"context {name!r}: its last chunk is missing"
        for name, head in contents.contexts.items()
        if head not in contents.rows
    ]
    return Checked(contents.holder, len(contents.rows), problems)


def _damaged(contents: Contents, progress: Progress) -> dict[bytes, Status]:
    by_place = sorted(contents.rows.values(), key=lambda row: row.offset)
    wrong = _verified(contents, progress(by_place))
    patience = time.monotonic() + (_PATIENCE_S if contents.holder else 0)
    while wrong:  # a chunk may have been rewritten or moved since the index was read
        now = _again(contents)
        still = [row for key in wrong if (row := now.get(key)) == contents.rows[key]]
        wrong = _verified(contents, [row for row in still if row is not None])
        if time.monotonic() >= patience:
            break
        time.sleep(_PATIENCE_S / 10)
    return wrong


def _again(contents: Contents) -> dict[bytes, ChunkRow]:
    try:
        return dict(read_contents(contents.directory).rows)
    except (StoreError, sqlite3.DatabaseError):
        return dict(contents.rows)


def _verified(contents: Contents, rows: Iterable[ChunkRow]) -> dict[bytes, Status]:
    found = payloads(contents.directory, rows)
    return {row.id.key: status for row, status, _ in found if status != Status.OK}


def _short(key: bytes) -> str:
    return key.hex()[:12]
