"""Parked contexts in a forked child, whose parent had calls and requests in other threads."""

from __future__ import annotations

import os
import threading

import llama_cpp
import pytest
from forking import exit_code, in_child
from parks import Parks
from switching import OTHER, PROMPT, ask

from llmaas_hooks import hookimpl


def sequences(llama, n):
    """Return the plugins' sequences that have cells."""
    memory = llama_cpp.llama_get_memory(llama.ctx)
    return [i for i in range(1, n) if llama_cpp.llama_memory_seq_pos_max(memory, i) >= 0]


class Inside:
    """Plugin that calls ``work`` once, inside the app's next call."""

    work = None

    @hookimpl
    def llmaas_decode(self):
        if self.work is not None:
            work, self.work = self.work, None
            work()


@pytest.fixture
def inside():
    return Inside()


@pytest.fixture
def parked(make, patched, inside):
    """Return an engine with parked cells, its suite and its tracker."""
    plugin = Parks()
    installed = patched(parks=plugin, inside=inside)
    llama = make()
    ask(llama, PROMPT, 2)
    ask(llama, OTHER, 2)
    tracker = plugin.engine._tracker
    assert sequences(llama, plugin.engine.n_seq_max)
    return llama, installed, tracker, plugin.engine.n_seq_max


def test_calls_of_other_threads_keep_no_cells_in_a_child(parked):
    llama, installed, tracker, n = parked
    inside, leaves = threading.Event(), threading.Event()

    def call():
        with installed._host.call(tracker), tracker.lent():
            inside.set()
            leaves.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(60)

    def child():
        assert (tracker.n_calls, tracker.is_lent) == (0, False)
        installed.revert()
        assert not tracker.parked
        assert sequences(llama, n) == []

    code = in_child(child)
    assert (tracker.n_calls, tracker.is_lent) == (1, True)
    leaves.set()
    thread.join()
    assert code == 0
    assert tracker.n_calls == 0


def test_requests_of_other_threads_keep_no_cells_in_a_child(parked, inside):
    llama, installed, tracker, n = parked
    codes = []

    def child():
        assert tracker.due == []
        installed.revert()
        assert sequences(llama, n) == []

    def fork_in_another_thread():
        forks = threading.Thread(target=lambda: codes.append(in_child(child)))
        forks.start()
        forks.join()

    inside.work = fork_in_another_thread
    words, _ = ask(llama, PROMPT, 3)
    assert codes == [0]
    assert len(words) == 3


def test_a_child_that_is_forked_inside_a_deferred_job_keeps_what_the_job_lent(parked):
    llama, installed, tracker, _ = parked
    codes = []

    def child():
        assert tracker.is_lent

    engine = installed._host.engine(llama)
    engine.defer(lambda: codes.append(in_child(child)))
    engine.settle()
    assert codes == [0]
    assert not tracker.is_lent


def test_a_child_that_is_forked_inside_a_call_ends_that_call(parked, inside):
    llama, installed, tracker, n = parked
    pids, code = [], 1
    inside.work = lambda: pids.append(os.fork())
    try:
        words, _ = ask(llama, PROMPT, 3)
        assert tracker.n_calls == 0
        assert len(words) == 3
        if pids == [0]:
            installed.revert()
            code = len(sequences(llama, n))
    finally:
        if pids == [0]:
            os._exit(code)
    assert exit_code(pids[0]) == 0
