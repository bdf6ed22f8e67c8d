"""Drop files from the page cache."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["drop_pages"]


def drop_pages(path: Path) -> None:
    """Write a file's data to disk and drop the file from the page cache."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
