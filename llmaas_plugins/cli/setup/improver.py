"""Lock of the process that improves a model in the background.

A process holds the lock as long as it lives. So the number of one that is gone, which another
process may have by now, is never taken for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import as_store_error, write
from llmaas_plugins.files.store_lock import try_lock

__all__ = ["found_improver", "improver_lock", "set_improver"]

_FILE = "improve.pid"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def improver_lock(folder: Path) -> Iterator[int | None]:
    """Take the lock for the model of a folder; yield its descriptor, or None if it is taken.

    The lock ends with the block, or with a process that has inherited the descriptor.

    Raises:
        StoreError: The file of the lock cannot be opened.
    """
    with as_store_error(f"cannot open {folder / _FILE}"):
        fd = os.open(folder / _FILE, _FLAGS, 0o600)
    try:
        has_it = try_lock(fd)
        if has_it:
            os.ftruncate(fd, 0)  # else a number that is read meanwhile is of a process that is gone
        yield fd if has_it else None
    finally:
        os.close(fd)


def set_improver(lock: int, process: int) -> None:
    """Write which process has the lock.

    Raises:
        StoreError: The number cannot be written.
    """
    with as_store_error("cannot write the number of a process"):
        os.ftruncate(lock, 0)
        write(lock, str(process).encode(), 0)


def found_improver(folder: Path) -> int | None:
    """Return the process that improves the model of a folder, or None if none does."""
    with contextlib.suppress(StoreError, OSError, ValueError), improver_lock(folder) as lock:
        if lock is None:
            return int((folder / _FILE).read_text())
    return None
