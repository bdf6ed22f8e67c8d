"""Caps on the speed of a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_limit_reads", "disk_limit", "read_limit"]

_BLKIO = Path("/sys/fs/cgroup/blkio")


def can_limit_reads() -> bool:
    """Return whether ``read_limit`` works here: it needs a writable cgroup v1 ``blkio``."""
    return (_BLKIO / "blkio.throttle.read_bps_device").exists() and os.access(_BLKIO, os.W_OK)


@contextmanager
def read_limit(folder: Path, bytes_per_s: int) -> Iterator[None]:
    """Limit this process's reads from the device under ``folder`` to ``bytes_per_s``.

    Raises:
        OSError: The ``blkio`` controller refuses the limit.
    """
    with _limit(folder, bytes_per_s, ["read"]):
        yield


@contextmanager
def disk_limit(folder: Path, bytes_per_s: int) -> Iterator[None]:
    """Limit this process's reads and its writes on ``folder``'s device, each to ``bytes_per_s``.

    The limit does not apply to buffered writes, which wait in the page cache.

    Raises:
        OSError: The ``blkio`` controller refuses the limit.
    """
    with _limit(folder, bytes_per_s, ["read", "write"]):
        yield


@contextmanager
def _limit(folder: Path, bytes_per_s: int, directions: Sequence[str]) -> Iterator[None]:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    group = _BLKIO / f"llmaas-bench-{os.getpid()}"
    group.mkdir(exist_ok=True)  # a killed process with the same id leaves its group behind
    try:
        for direction in directions:
            throttle = group / f"blkio.throttle.{direction}_bps_device"
            throttle.write_text(f"{name} {bytes_per_s}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()
