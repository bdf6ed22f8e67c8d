"""Partial files, which one process at a time writes until they are complete."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import OPEN_FLAGS
from llmaas_plugins.files.store_lock import try_lock

__all__ = ["taken"]


@contextlib.contextmanager
def taken(partial: Path) -> Iterator[int]:
    """Open a partial file that no other process can write meanwhile.

    Raises:
        StoreError: Another process writes the file, or it is not a regular file.
        OSError: The file cannot be opened.
    """
    fd = _locked(partial)
    while not _is_named(fd, partial):  # the previous holder has just renamed it
        os.close(fd)
        fd = _locked(partial)
    try:
        yield fd
    finally:
        os.close(fd)


def _locked(partial: Path) -> int:
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | OPEN_FLAGS, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{partial} is not a regular file; remove it.")
    if not try_lock(fd):
        os.close(fd)
        raise StoreError(f"{partial} is being written by another process: wait for it, or stop it.")
    return fd


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
