"""Disk space that is reserved for deletions.

SQLite writes before it removes, so on a full disk nothing could be deleted. A deletion on a full
disk is therefore given the reserved space, which is reserved again afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmaas_hooks import LlmaasError

__all__ = ["Reserve"]

_BYTES = 1 << 20
_LEAST_BYTES = 16 << 10

_T = TypeVar("_T")


class Reserve:
    """A file that reserves disk space and is never read."""

    def __init__(self, path: Path) -> None:
        """Reserve space in the file at ``path``."""
        self._path = path
        self._fill()

    def lent_to(self, delete: Callable[[], _T]) -> _T:
        """Run ``delete`` and return its result; on a full disk, free the reserve and run it again.

        Raises:
            LlmaasError: The deletion failed for another reason, or again without the reserve.
        """
        try:
            return delete()
        except LlmaasError as error:
            if not _is_full(error):
                raise
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        try:
            return delete()
        finally:
            self._fill()

    def _fill(self) -> None:
        """Reserve as much as there is, up to the limit; some file systems cannot reserve space."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _allocate(fd)
            finally:
                os.close(fd)


def _allocate(fd: int) -> None:
    n_bytes = _BYTES
    while n_bytes >= _LEAST_BYTES:
        try:
            os.posix_fallocate(fd, 0, n_bytes)
        except OSError:
            n_bytes //= 2
            os.ftruncate(fd, 0)
        else:
            return


def _is_full(error: BaseException | None) -> bool:
    """Return whether a full disk is the cause of an error."""
    while error is not None:
        if isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return True
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        error = error.__cause__
    return False
