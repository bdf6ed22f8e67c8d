"""Files that cannot be read for a while, as on a failing disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def unreadable(path):
    """Make reads through every open descriptor of a file fail inside the block."""
    fds = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if _is_of(fd, path)]
    assert fds
    bad, kept = os.open(path, os.O_WRONLY), [os.dup(fd) for fd in fds]
    try:
        for fd in fds:
            os.dup2(bad, fd)
        yield
    finally:
        for fd, good in zip(fds, kept, strict=True):
            os.dup2(good, fd)
            os.close(good)
        os.close(bad)


def _is_of(fd, path):
    try:
        return fd.samefile(path)
    except FileNotFoundError:  # the listing's own descriptor, or no file
        return False
