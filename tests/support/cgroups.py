"""A memory cgroup for a child process: what it uses at most, page cache included."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from llmaas_eval.switching import groups


@contextmanager
def memory_group():
    """A new, empty group; the test is skipped where there can be none."""
    if not groups.can_limit_memory():
        pytest.skip("no writable cgroup v1 memory controller")
    with groups.memory_group() as group:
        yield group


def file_bytes(group):
    """Page cache that is charged to a group now.

    Code, libraries and models are charged to whoever reads them first and stay so when it has
    ended: what is left then, its own files removed, is by chance, and no need of the process.
    """
    lines = (group.path / "memory.stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("cache "))
