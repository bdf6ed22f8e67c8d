"""A memory cgroup for a child process, to measure its peak memory including page cache."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from llmaas_eval.switching import groups


@contextmanager
def memory_group():
    """Yield a new, empty group; skip the test where none can be created."""
    if not groups.can_limit_memory():
        pytest.skip("no writable cgroup v1 memory controller")
    with groups.memory_group() as group:
        yield group


def file_bytes(group):
    """Return the page cache bytes that are charged to a group now.

    The kernel charges code, libraries and models to their first reader, and keeps the charge after
    that process ends. Once the process's own files are removed, the remaining charge depends on
    chance and is not memory that the process needs.
    """
    lines = (group.path / "memory.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("cache "))
