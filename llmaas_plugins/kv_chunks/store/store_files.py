"""Names of the files of a KV store."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.private_files import PrivateFiles

__all__ = ["FILES", "INDEX", "LOCK", "SLAB", "UNUSABLE", "name_older", "require_store"]

LOCK = "lock"
INDEX = "index.sqlite"
SLAB = "chunks.slab"
UNUSABLE = "index.sqlite.unusable"
_NAMES = frozenset(
    {LOCK, SLAB, UNUSABLE, *(INDEX + suffix for suffix in ("", "-wal", "-shm", "-journal"))}
)
_log = logging.getLogger("llmaas.kv_chunks")
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


def name_older(directory: Path) -> None:
    """Log that an earlier run's contexts are still on disk; another app may need them."""
    if (directory / SLAB).exists():
        _log.warning(
            "disk_budget is 0, but %s still holds contexts of earlier runs. Delete this folder if "
            "no app needs them.",
            directory,
        )
