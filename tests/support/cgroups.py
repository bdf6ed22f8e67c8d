"""A memory cgroup for a child process: what it uses at most, page cache included."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

_CONTROLLER = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()


class MemoryGroup:
    """A cgroup v1 memory group."""

    def __init__(self, path):
        self._path = path

    def join(self):
        """Move the calling process here; a ``preexec_fn``."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self):
        """Most bytes charged at a time."""
        return int((self._path / "memory.max_usage_in_bytes").read_text())


@contextmanager
def memory_group():
    """A new, empty group; the test is skipped where there can be none."""
    path = _CONTROLLER / f"llmaas-test-{os.getpid()}-{next(_numbers)}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no writable cgroup v1 memory controller: {error}")
    try:
        yield MemoryGroup(path)
    finally:
        _remove(path)


def _remove(path):
    for _ in range(100):  # a process that was just waited for may still be leaving
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
    path.rmdir()
