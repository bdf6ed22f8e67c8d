"""Reading and writing at a place in a file, all of it; what makes a new name last; refusals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["OPEN_FLAGS", "as_store_error", "read_into", "sync_directory", "write"]

OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe would otherwise wait for its other end."""


@contextlib.contextmanager
def as_store_error(what: str, then: str = "") -> Iterator[None]:
    """What the system refuses as our own error.

    Args:
        what: What it refuses.
        then: What to know about it, or to do.

    Raises:
        StoreError: Any ``OSError`` inside; our own errors stay what they are.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror or error}.{then}") from error


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
