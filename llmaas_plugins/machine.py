"""Resources of the machine for this process: memory and its limit, processors, disk space."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Room",
    "available_bytes",
    "drop_cached",
    "mapped_bytes",
    "memory_limit_bytes",
    "nearest_directory",
    "peak_bytes",
    "processor_name",
    "release_memory",
    "resident_bytes",
    "room",
    "total_bytes",
    "usable_processors",
]

_PAGE = os.sysconf("SC_PAGE_SIZE")

_UNLIMITED_BYTES = 1 << 60
"""Threshold of "no limit": cgroup v1 then writes a number near 2**63."""


@dataclass(frozen=True, slots=True)
class Room:
    """Free space at a directory that exists or can be created.

    Attributes:
        is_writable: Whether this process may create files there.
        free_bytes: Free bytes of the file system.
    """

    is_writable: bool
    free_bytes: int


def room(directory: Path) -> Room:
    """Return the free space at ``directory``, or at its nearest existing parent; create nothing."""
    place = nearest_directory(directory)
    is_writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return Room(is_writable, shutil.disk_usage(place).free)


def nearest_directory(directory: Path) -> Path:
    """Return ``directory``, or its nearest parent that exists."""
    place = directory.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place


def processor_name() -> str:
    """Return the name of the processors, or of their architecture."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the current resident memory of this process, or its peak where /proc is hidden."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def mapped_bytes() -> int:
    """Return the part of the resident memory that is pages of mapped files; 0 without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * _PAGE
    except FileNotFoundError:
        return 0


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far.

    ``getrusage`` begins with the peak of the parent process, so it serves only where /proc is
    hidden.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) << 10


def release_memory() -> None:
    """Return freed memory that glibc's allocator holds to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def drop_cached(path: str) -> None:
    """Drop a file from the page cache, except pages in use."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def total_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's cgroup if that is less."""
    limit = memory_limit_bytes()
    total = _meminfo("MemTotal")
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Return the memory that this process can have in all: its own, plus what is available.

    The result is limited by the system's available memory, and by the limit of each cgroup of the
    process minus the memory of other processes in it. The page cache does not count as used,
    because it can be dropped.
    """
    resident = resident_bytes()
    found = [resident + _meminfo("MemAvailable")]
    for group in _groups(Path("/")):
        limit = group.limit()
        if limit is not None:
            found.append(min(limit, resident + max(0, limit - group.used())))
    return min(found)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the tightest memory limit of this process's cgroup and its parents, or None.

    Args:
        root: Directory in which ``proc`` and ``sys`` are mounted.
    """
    limits = [group.limit() for group in _groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


_SYSCONF = {"MemTotal": "SC_PHYS_PAGES", "MemAvailable": "SC_AVPHYS_PAGES"}
"""Names of system parameters that replace /proc/meminfo. The available memory is then only the free
memory.
"""


def _meminfo(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return os.sysconf(_SYSCONF[name]) * _PAGE
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


@dataclass(frozen=True, slots=True)
class _Group:
    """Memory cgroup.

    Attributes:
        path: Directory of the cgroup.
        is_v2: Whether the cgroup belongs to the unified hierarchy.
    """

    path: Path
    is_v2: bool

    def limit(self) -> int | None:
        """Return the memory limit of the cgroup in bytes, or None."""
        names = ("memory.max", "memory.high") if self.is_v2 else ("memory.limit_in_bytes",)
        found = [number for name in names if (number := _number(self.path / name)) is not None]
        return min((number for number in found if number < _UNLIMITED_BYTES), default=None)

    def used(self) -> int:
        """Return the bytes that the cgroup uses, without page cache that can be dropped."""
        name = "memory.current" if self.is_v2 else "memory.usage_in_bytes"
        prefix = "" if self.is_v2 else "total_"
        files = {f"{prefix}inactive_file", f"{prefix}active_file"}
        try:
            lines = (self.path / "memory.stat").read_text().splitlines()
        except OSError:
            lines = []
        pairs = [line.split() for line in lines]
        cached = sum(int(pair[1]) for pair in pairs if len(pair) > 1 and pair[0] in files)
        return max(0, (_number(self.path / name) or 0) - cached)


def _groups(root: Path) -> list[_Group]:
    """Return the cgroup of this process and its parents, because limits are nested."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = mount / path.lstrip("/")
        inside = [parent for parent in group.parents if parent.is_relative_to(mount)]
        groups += [_Group(parent, is_v2=not controllers) for parent in (group, *inside)]
    return groups


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # missing in this cgroup, or "max"
        return None
