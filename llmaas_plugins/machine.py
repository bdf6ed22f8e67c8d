"""What the machine gives this process: memory, its limit, room in a directory."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Room",
    "available_bytes",
    "memory_limit_bytes",
    "release_memory",
    "resident_bytes",
    "room",
]

_PAGE = os.sysconf("SC_PAGE_SIZE")

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """A directory that exists or can be made.

    Attributes:
        is_writable: Whether this process may create files there.
        free_bytes: Left on its file system.
    """

    is_writable: bool
    free_bytes: int


def room(directory: Path) -> Room:
    """Look at ``directory``, or at its nearest parent that exists; creates nothing."""
    place = directory.expanduser().absolute()
    while not place.exists():
        place = place.parent
    is_writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return Room(is_writable, shutil.disk_usage(place).free)


def resident_bytes() -> int:
    """Memory of this process now (RSS)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def release_memory() -> None:
    """Give back what the C allocator keeps of freed memory, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Memory that this process can have in all: its own, and what the system could still give.

    No more than the limit of its cgroup, if there is one.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    limit = memory_limit_bytes()
    wanted = resident_bytes() + free
    return wanted if limit is None else min(wanted, limit)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of this process's cgroup and its parents; None without one.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    limits = [_limit(file) for file in _limit_files(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        inside = [parent for parent in group.parents if parent.is_relative_to(mount)]
        files += [parent / name for parent in (group, *inside)]
    return files


def _limit(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):  # not there in this cgroup, or "max"
        return None
    return limit if limit < _UNLIMITED_BYTES else None
