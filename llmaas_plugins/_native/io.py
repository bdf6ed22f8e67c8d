"""Measure asynchronous reads, as used for streaming weights."""

from __future__ import annotations

import os
from pathlib import Path

from llmaas_hooks.errors import StoreError

from ._ffi import ffi, lib
from .base import Status, fail

__all__ = ["read_rate"]


def read_rate(path: Path, n_bytes: int = 1 << 20, depth: int = 16, seconds: float = 0.5) -> float:
    """Return the bytes per second of reading a file, bypassing the page cache if possible.

    Args:
        path: File of at least ``n_bytes``.
        n_bytes: Bytes per read, a multiple of 4 KiB.
        depth: Number of concurrent reads.
        seconds: How long to measure.

    Raises:
        StoreError: The file cannot be read.
    """
    rate = ffi.new("double *")
    try:
        fd = _open(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    try:
        n_file = os.fstat(fd).st_size
        status = lib.llmaas_io_measure(
            lib.LLMAAS_IO_BEST, fd, n_file, n_bytes, depth, seconds, rate
        )
        if status == Status.EIO:
            raise StoreError(f"cannot read {path}: {os.strerror(ffi.errno)}")
    finally:
        os.close(fd)
    if status:
        raise fail(f"reads of {n_bytes} bytes, {depth} at a time, of {n_file}", status)
    return float(rate[0])


def _open(path: Path) -> int:
    """Open a file with ``O_DIRECT`` if its file system supports that."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:  # such as tmpfs
        return os.open(path, flags)
