"""A memory cgroup around each system's process: what it uses counts, page cache included."""

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
    """Whether ``memory_group`` works here: a cgroup v1 controller that we may write to."""
    return (_CONTROLLER / "memory.limit_in_bytes").exists() and os.access(_CONTROLLER, os.W_OK)


class MemoryGroup:
    """A cgroup v1 memory group."""

    def __init__(self, path: Path) -> None:
        """Attach to the group at ``path``."""
        self.path = path

    def join(self) -> None:
        """Move the calling process here."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def used(self) -> int:
        """Bytes charged now."""
        return self._number("memory.usage_in_bytes")

    @property
    def peak(self) -> int:
        """Most bytes charged at a time since ``limit``."""
        return self._number("memory.max_usage_in_bytes")

    def limit(self, n_bytes: int) -> None:
        """Allow no more than ``n_bytes``, and count the peak from now on."""
        (self.path / "memory.limit_in_bytes").write_text(str(n_bytes))
        (self.path / "memory.max_usage_in_bytes").write_text("0")

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text())


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new, empty group, removed when the processes in it have ended.

    Raises:
        OSError: The controller refuses.
    """
    path = _CONTROLLER / f"llmaas-eval-{os.getpid()}-{next(_numbers)}"
    path.mkdir()
    try:
        yield MemoryGroup(path)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    for _ in range(100):  # a process that was just waited for may still be leaving
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
    path.rmdir()
