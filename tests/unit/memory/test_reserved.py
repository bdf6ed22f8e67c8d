"""Memory that is kept free for work, which others make room for."""

from __future__ import annotations

import pytest

from llmaas_hooks import UnmetBudgetError
from llmaas_plugins import process_memory

MIB = 1 << 20


class Limit:
    """A limit of 100 MiB for a process."""

    held_bytes = 0

    def __init__(self, process):
        self.process = process

    def room(self):
        return 100 * MIB - self.process.resident_bytes() - process_memory.promised()

    def grant(self, n_bytes):
        return max(0, min(n_bytes, self.room()))


class Process:
    """A process of 40 MiB beside contexts that can be given back."""

    def __init__(self, contexts):
        self.contexts = contexts * MIB
        self.fixed = 40 * MIB
        self.limit = Limit(self)

    def resident_bytes(self):
        return self.fixed + self.contexts

    @property
    def held_bytes(self):
        return self.contexts

    releasable_bytes = held_bytes

    promised_bytes = 0

    def release(self, n_bytes):
        released = min(n_bytes, self.contexts)
        self.contexts -= released
        return released


@pytest.fixture
def process(monkeypatch):
    def make(contexts):
        made = Process(contexts)
        monkeypatch.setattr(process_memory, "_limits", set())
        monkeypatch.setattr(process_memory, "_users", set())
        monkeypatch.setattr(process_memory, "resident_bytes", made.resident_bytes)
        process_memory.add_limit(made.limit)
        process_memory.add_user(made)
        return made

    return make


def test_others_make_room_and_leave_it(process):
    made = process(50)
    with process_memory.reserved(30 * MIB, "learning"):
        assert made.contexts == 30 * MIB
        assert process_memory.room() == 0
        made.fixed += 20 * MIB  # the work takes a part of it
        assert process_memory.promised() == 10 * MIB
        assert process_memory.room() == 0
        made.fixed -= 20 * MIB
    assert process_memory.promised() == 0
    assert process_memory.room() == 30 * MIB


def test_contexts_that_grow_meanwhile_take_nothing_of_what_is_reserved(process):
    made = process(10)
    with process_memory.reserved(30 * MIB, "learning"):
        for _ in range(3):
            made.contexts += process_memory.grant(100 * MIB)
        assert made.contexts == 30 * MIB
        made.fixed += 20 * MIB  # the work takes a part of it
        assert process_memory.promised() == 10 * MIB
        made.release(30 * MIB)  # contexts that leave give the work nothing to take again
        assert process_memory.promised() == 10 * MIB
    assert process_memory.room() == 40 * MIB


def test_what_does_not_fit_is_refused_and_reserves_nothing(process):
    made = process(10)
    match = r"learning takes up to 70 MiB, and the memory budget leaves 60 MiB"
    with (
        pytest.raises(UnmetBudgetError, match=match) as refused,
        process_memory.reserved(70 * MIB, "learning"),
    ):
        pytest.fail("the block ran")
    assert refused.value.missing == 10 * MIB
    assert made.contexts == 10 * MIB  # nothing was released in vain
    assert process_memory.promised() == 0


def test_without_a_limit_nothing_is_reserved(process, monkeypatch):
    process(50)
    monkeypatch.setattr(process_memory, "_limits", set())
    with process_memory.reserved(1 << 40, "learning"):
        assert process_memory.promised() == 0
