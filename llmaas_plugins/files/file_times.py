"""Whether the times of a file tell that its content changed."""

from __future__ import annotations

import ctypes
import os

__all__ = ["records_mapped_writes"]

_STATFS_BYTES = 512
"""More than any system's ``struct statfs``, which begins with the type of the file system."""
_TIMELESS = frozenset({0x01021994, 0x858458F6})
"""Types of Linux's tmpfs and ramfs, which record no time when a process writes through a map."""


def records_mapped_writes(path: str | os.PathLike[str]) -> bool:
    """Return whether writes through a memory map change a file's times, as by other writes.

    Return True also for a file that does not exist.
    """
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).statfs(os.fsencode(path), found) != 0:
        return True
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF not in _TIMELESS
