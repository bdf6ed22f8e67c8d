"""Free space against the set of free pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from llmaas_plugins.kv_chunks.store.extents import PAGE, ExtentAllocator, page_round

N_PAGES = 20
sizes = st.integers(1, 6 * PAGE)
anywhere = st.integers(-2, N_PAGES + 2).map(lambda page: page * PAGE)


def pages(offset, n_bytes):
    return set(range(offset // PAGE, (offset + page_round(n_bytes)) // PAGE))


class Extents(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.space = ExtentAllocator(N_PAGES * PAGE + 17)
        self.free = set(range(N_PAGES))
        self.held = []

    def hold(self, offset, n_bytes):
        taken = pages(offset, n_bytes)
        assert taken <= self.free
        self.free -= taken
        self.held.append((offset, n_bytes))

    @rule(n_bytes=sizes)
    def allocate(self, n_bytes):
        fits = (p * PAGE for p in range(N_PAGES) if pages(p * PAGE, n_bytes) <= self.free)
        lowest = next(fits, None)
        assert self.space.allocate(n_bytes) == lowest
        if lowest is not None:
            self.hold(lowest, n_bytes)

    @rule(offset=anywhere | st.integers(0, N_PAGES * PAGE), n_bytes=sizes)
    def claim(self, offset, n_bytes):
        is_free = offset % PAGE == 0 and pages(offset, n_bytes) <= self.free
        assert self.space.claim(offset, n_bytes) == is_free
        if is_free:
            self.hold(offset, n_bytes)

    @rule(i=st.integers(0, 99))
    def release(self, i):
        if self.held:
            offset, n_bytes = self.held.pop(i % len(self.held))
            self.space.release(offset, n_bytes)
            self.free |= pages(offset, n_bytes)

    @rule(i=st.integers(0, 99), share=st.floats(0, 1))
    def shrink(self, i, share):
        if self.held:
            i %= len(self.held)
            offset, n_bytes = self.held[i]
            rest = max(1, int(n_bytes * share))
            self.space.shrink(offset, n_bytes, rest)
            self.free |= pages(offset, n_bytes) - pages(offset, rest)
            self.held[i] = (offset, rest)

    @rule(page=st.integers(0, N_PAGES - 1), n=st.integers(1, 5))
    def release_too_much(self, page, n):
        if pages(page * PAGE, n * PAGE) & self.free:
            with pytest.raises(ValueError, match="free already"):
                self.space.release(page * PAGE, n * PAGE)

    @invariant()
    def pages_in_use_are_counted(self):
        assert self.space.used == (N_PAGES - len(self.free)) * PAGE

    def teardown(self):
        for offset, n_bytes in self.held:
            self.space.release(offset, n_bytes)
        assert self.space.allocate(self.space.capacity) == 0


@pytest.mark.slow
def test_extents_are_a_set_of_pages():
    run_state_machine_as_test(Extents, settings=settings(max_examples=60, deadline=None))
