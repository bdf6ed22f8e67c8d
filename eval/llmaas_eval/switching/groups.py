"""A memory cgroup around each system's process; it counts the page cache, too."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MemoryGroup", "can_limit_memory", "memory_group"]

_CONTROLLER = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()


def can_limit_memory() -> bool:
    """Return whether this machine has a cgroup v1 memory controller that we may write to."""
    return (_CONTROLLER / "memory.limit_in_bytes").exists() and os.access(_CONTROLLER, os.W_OK)


class MemoryGroup:
    """A cgroup v1 memory group."""

    def __init__(self, path: Path) -> None:
        """Attach to the group at ``path``."""
        self.path = path

    def join(self) -> None:
        """Move the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def used(self) -> int:
        """Bytes charged to the group now."""
        return self._number("memory.usage_in_bytes")

    @property
    def peak(self) -> int:
        """Highest number of bytes charged at once since ``limit``."""
        return self._number("memory.max_usage_in_bytes")

    def limit(self, n_bytes: int) -> None:
        """Limit the group to ``n_bytes`` and restart its peak."""
        (self.path / "memory.limit_in_bytes").write_text(str(n_bytes))
        (self.path / "memory.max_usage_in_bytes").write_text("0")

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text())


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Yield a new, empty group; remove it after its processes have ended.

    Raises:
        OSError: The controller refuses the group.
    """
    path = _CONTROLLER / f"llmaas-eval-{os.getpid()}-{next(_numbers)}"
    path.mkdir()
    try:
        yield MemoryGroup(path)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    for _ in range(100):  # a process that just ended may still be in the group
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
    path.rmdir()
