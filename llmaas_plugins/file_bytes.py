"""Reading and writing at a place in a file, all of it, and what makes a new name last."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["read_into", "sync_directory", "write"]


def read_into(fd: int, room: memoryview, at: int) -> int:
    """Fill ``room``; how many bytes of it, fewer only where the file ends."""
    n_read = 0
    while n_read < len(room) and (n := os.preadv(fd, [room[n_read:]], at + n_read)):
        n_read += n
    return n_read


def write(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        n_written = os.pwrite(fd, view, at)
        view = view[n_written:]
        at += n_written


def sync_directory(directory: Path) -> None:
    """Bring names that were made or changed in it to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
