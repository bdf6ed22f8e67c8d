"""Copy a store, or one of its contexts, into a new store."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmaas_hooks import StoreError
from llmaas_plugins import _native
from llmaas_plugins._native import Status
from llmaas_plugins.files.temporary_folder import folder_beside
from llmaas_plugins.kv_chunks.maintenance.checking import Progress
from llmaas_plugins.kv_chunks.maintenance.snapshot import (
    StoreSnapshot,
    read_payloads,
    read_snapshot,
)
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.index import ChunkRow, IndexUpdate

__all__ = ["ExportResult", "export_store"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of exporting a store.

    Attributes:
        n_contexts: Number of copied named contexts.
        n_chunks: Number of copied chunks.
        n_bytes: Bytes of the copied payloads.
        skipped: Number of chunks not copied: damaged, or after a damaged or missing chunk.
    """

    n_contexts: int
    n_chunks: int
    n_bytes: int
    skipped: int


def export_store(
    directory: Path, target: Path, context_id: str | None = None, progress: Progress = iter
) -> ExportResult:
    """Copy a store, or one context of it, into a new store, which appears atomically.

    Args:
        directory: Directory of the store, which may be in use.
        target: A directory that does not exist.
        context_id: Name of the context to copy; None for everything.
        progress: Wraps the iteration over the chunks, for a progress display.

    Raises:
        StoreError: The target exists, there is no such store or context, or the disk failed.
    """
    target = target.expanduser()
    if os.path.lexists(target):
        raise StoreError(f"{target} already exists; nothing was written. Choose another name.")
    try:
        snapshot = read_snapshot(directory)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"cannot read KV store {directory}: {error}") from error
    rows = _wanted(snapshot, context_id)
    with folder_beside(target) as fresh:
        try:
            done = _copy(snapshot, rows, fresh, context_id, progress)
            fresh.rename(target)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot write {target}: {error}") from error
    return done


def _wanted(snapshot: StoreSnapshot, context_id: str | None) -> list[ChunkRow]:
    """Return the rows to copy, parents first."""
    if context_id is None:
        return list(_parents_first(snapshot))
    if context_id not in snapshot.contexts:
        raise StoreError(_unknown_context([context_id], snapshot.contexts))
    path = []
    row = snapshot.rows.get(snapshot.contexts[context_id])
    while row is not None:
        path.append(row)
        row = snapshot.before(row)
    return [row for row in reversed(path) if row.id.key in snapshot.rows]


def _parents_first(snapshot: StoreSnapshot) -> Iterator[ChunkRow]:
    children: dict[bytes, list[ChunkRow]] = {}
    for row in snapshot.rows.values():
        children.setdefault(row.id.parent, []).append(row)
    waiting = [row for root in snapshot.layouts for row in children.get(root, [])]
    while waiting:
        row = waiting.pop()
        yield row
        waiting += children.get(row.id.key, [])


def _copy(
    snapshot: StoreSnapshot,
    rows: Sequence[ChunkRow],
    fresh: Path,
    context_id: str | None,
    progress: Progress,
) -> ExportResult:
    n_bytes = DiskTier.HEADER_BYTES + sum(page_round(row.size) for row in rows)
    with contextlib.closing(DiskStore(fresh, n_bytes)) as disk:
        update = IndexUpdate(layouts=dict(snapshot.layouts))
        offsets = itertools.accumulate((page_round(row.size) for row in rows), initial=0)
        for offset, found in zip(
            offsets, read_payloads(snapshot.directory, progress(rows)), strict=False
        ):
            row, status, data = found
            is_behind = row.id.parent in update.added or row.id.parent in snapshot.layouts
            if status == Status.OK and is_behind:
                at = [int(np.frombuffer(data, np.uint8).ctypes.data)]
                _native.store_write(disk.tier.fd, [disk.tier.file_offset(offset)], [row.size], at)
                update.added[row.id.key] = row._replace(offset=offset)
        update.used = {key: None for key in snapshot.rows if key in update.added}
        update.heads = _heads(snapshot, update.added, context_id)
        disk.index.apply(update)
        os.fsync(disk.tier.fd)
    total = sum(row.size for row in update.added.values())
    skipped = len(rows) - len(update.added)
    if context_id is None:
        skipped = len(snapshot.rows) - len(update.added)
    return ExportResult(len(update.heads), len(update.added), total, skipped)


def _heads(
    snapshot: StoreSnapshot, copied: Mapping[bytes, ChunkRow], context_id: str | None
) -> dict[str, bytes]:
    """Return the key of the last copied chunk of each context."""
    heads = {}
    for name, head in snapshot.contexts.items():
        row = snapshot.rows.get(head)
        while row is not None and row.id.key not in copied:
            row = snapshot.before(row)
        if row is not None and context_id in (None, name):
            heads[name] = row.id.key
    return heads


def _unknown_context(names: Iterable[str], known: Iterable[str]) -> str:
    wanted, there = ", ".join(map(repr, names)), ", ".join(map(repr, sorted(known))) or "none"
    return f"no such context: {wanted}; nothing was changed. Contexts in this store: {there}"
