"""Names of the files of a KV store."""

from __future__ import annotations

import os
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.private_files import PrivateFiles

__all__ = ["FILES", "INDEX", "LOCK", "SLAB", "UNUSABLE", "require_store"]

LOCK = "lock"
INDEX = "index.sqlite"
SLAB = "chunks.slab"
UNUSABLE = "index.sqlite.unusable"
_NAMES = frozenset(
    {LOCK, SLAB, UNUSABLE, *(INDEX + suffix for suffix in ("", "-wal", "-shm", "-journal"))}
)
FILES = PrivateFiles("KV store", "plugins.kv_chunks.store", _NAMES.__contains__)


def require_store(directory: Path) -> None:
    """Check that a directory holds a store.

    Raises:
        StoreError: The directory has no index.
    """
    if not os.path.lexists(directory / INDEX):
        raise StoreError(
            f"there is no KV store in {directory}. Name its directory with --store or in "
            "plugins.kv_chunks.store."
        )
