"""What memory this process has, and may have."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_bytes", "resident_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Memory of this process now (RSS)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def available_bytes() -> int:
    """Memory that this process can have in all: its own, and what the system could still give.

    No more than the limits of its cgroup, if it has any.
    """
    free = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    return min([resident_bytes() + free, *_limits()])


def _field(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _limits() -> list[int]:
    """Of the cgroups this process is in, of both versions; one that has no limit is left out."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            path = _CGROUPS / group.lstrip("/") / "memory.max"
        elif "memory" in controllers.split(","):
            path = _CGROUPS / "memory" / group.lstrip("/") / "memory.limit_in_bytes"
        else:
            continue
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # not mounted there, or "max"
            continue
    return found
