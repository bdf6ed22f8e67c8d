"""Read and write complete byte ranges of files, sync directories, and convert OS errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["OPEN_FLAGS", "as_store_error", "read_into", "sync_directory", "write"]

OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
"""Flags for opening files. Without ``O_NONBLOCK``, opening a pipe would wait for its other end."""


@contextlib.contextmanager
def as_store_error(what: str, then: str = "") -> Iterator[None]:
    """Convert an ``OSError`` inside the block to ``StoreError``.

    Args:
        what: Start of the message: the operation that failed.
        then: End of the message: the consequence, or what to do.

    Raises:
        StoreError: An ``OSError`` was raised inside the block. A ``StoreError`` passes unchanged.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror or error}.{then}") from error


def read_into(fd: int, room: memoryview, at: int) -> int:
    """Fill ``room`` from offset ``at``; return the bytes read, fewer only at the file's end."""
    n_read = 0
    while n_read < len(room) and (n := os.preadv(fd, [room[n_read:]], at + n_read)):
        n_read += n
    return n_read


def write(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of ``data`` at offset ``at``."""
    view = memoryview(data)
    while view:
        n_written = os.pwrite(fd, view, at)
        view = view[n_written:]
        at += n_written


def sync_directory(directory: Path) -> None:
    """Write new and changed names of a directory to disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
