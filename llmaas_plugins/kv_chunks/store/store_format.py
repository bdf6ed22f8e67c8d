"""Detect the format of a store without changing any file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from pathlib import Path
from urllib.parse import quote

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.store.store_files import FILES, INDEX, SLAB

__all__ = ["FORMAT", "check_format", "pack_header", "read_only_uri"]

FORMAT = 2
"""Format of the slab's header and of the index; a change of either increases both."""

_HEADER = struct.Struct("<8sI16s")
_MAGIC = b"LLMAASKV"
_MAX_FORMAT = 1 << 16  # a larger number means damage


def pack_header(store_id: bytes) -> bytes:
    """Return the first bytes of a slab."""
    return _HEADER.pack(_MAGIC, FORMAT, store_id)


def check_format(directory: Path) -> None:
    """Refuse a store of another format. Damage is not reported here.

    Raises:
        StoreError: The slab's header or the index names another format.
    """
    for found in (_slab_format(directory / SLAB), _index_format(directory / INDEX)):
        if found is not None and found != FORMAT and abs(found) <= _MAX_FORMAT:
            raise StoreError(
                f"KV store {directory} has format {found}, but this version of llmaas_plugins "
                f"reads format {FORMAT}; nothing was changed. Use the version that wrote it, or "
                "set plugins.kv_chunks.store to another directory."
            )


def read_only_uri(index: Path) -> str:
    """Return the URI with which SQLite opens an index read-only.

    Without a write-ahead log no process has the index open. It is then opened as immutable, so
    that SQLite neither needs nor creates other files. If a process opens it meanwhile, read again.
    """
    has_wal = index.with_name(index.name + "-wal").is_file()
    name = quote(os.fsencode(index.absolute()))
    return f"file:{name}?mode=ro" + ("" if has_wal else "&immutable=1")


def _slab_format(path: Path) -> int | None:
    if not FILES.is_regular(path):
        return None
    fd = FILES.open(path, os.O_RDONLY)
    try:
        header = os.pread(fd, _HEADER.size, 0)
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(header) < _HEADER.size:
        return None
    magic, version, _ = _HEADER.unpack(header)
    return int(version) if magic == _MAGIC else None


def _index_format(path: Path) -> int | None:
    if not FILES.is_regular(path):
        return None
    try:
        with contextlib.closing(sqlite3.connect(read_only_uri(path), uri=True)) as db:
            (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
    except (sqlite3.Error, OSError, UnicodeDecodeError):  # SQLite's message may not be UTF-8
        return None
    return int(version) if n_tables else None
