"""Deferred work: callers wait for it, and it does not wait for itself."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest
from forking import in_child
from interrupting import interruptions

from llmaas_patches import background as background_module
from llmaas_patches.background import BackgroundWork
from llmaas_patches.collecting import Collecting


@pytest.fixture
def background():
    background = BackgroundWork(Collecting())
    yield background
    background.close()


def test_no_thread_before_the_first_job():
    before = threading.active_count()
    background = BackgroundWork(Collecting())
    assert threading.active_count() == before
    background.close()


def test_settle_waits_under_every_handle(background):
    for handle in (1, 2):
        gate, done = threading.Event(), []

        def job(gate=gate, done=done):
            gate.wait(5)
            done.append(threading.current_thread().name)

        background.defer((1, 2), job)
        threading.Timer(0.02, gate.set).start()
        background.settle(handle)
        assert done == ["llmaas-background"]
        assert background.pending == {}


def test_ctrl_c_anywhere_in_settle_stops_nobody():
    for interruption in interruptions(background_module, threading):
        background, gate = BackgroundWork(Collecting()), queue.SimpleQueue()
        background.defer((1,), lambda gate=gate: gate.get(timeout=60))
        opens = threading.Timer(0.005, gate.put, [None])
        opens.start()
        with interruption:
            background.settle(1)
        closes = threading.Thread(target=background.close, daemon=True)
        closes.start()
        closes.join(30)
        assert not closes.is_alive(), interruption.where
        opens.join()


def test_ctrl_c_anywhere_in_the_first_defer_leaves_a_thread_that_works():
    for interruption in interruptions(background_module, threading):
        background = BackgroundWork(Collecting())
        with interruption:
            background.defer((1,), lambda: None)
        waits = threading.Thread(target=background.settle, args=[1], daemon=True)
        waits.start()
        waits.join(10)
        assert not waits.is_alive(), interruption.where
        background.close()


def test_a_signal_handler_may_wait_for_the_job_that_is_being_queued(background):
    """The signal comes when callers wait for the job already, but before it is in the queue."""
    jobs, done, waited = background._jobs, [], []

    class Signaled:
        def put(self, job):
            if not waited:
                waited.append(True)
                signal.raise_signal(signal.SIGUSR1)
            jobs.put(job)

        def __getattr__(self, name):
            return getattr(jobs, name)

    def handler(*_):
        background.settle(1)
        waited.append(list(done))

    before = signal.signal(signal.SIGUSR1, handler)
    background._jobs = Signaled()
    try:
        background.defer((1,), lambda: done.append(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
        background._jobs = jobs
    background.close()
    assert waited == [True, [1]]
    assert done == [1]


def test_settle_of_another_engine_does_not_wait(background):
    gate = threading.Event()
    background.defer((1,), gate.wait)
    started = time.perf_counter()
    background.settle(2)
    assert time.perf_counter() - started < 1
    assert 1 in background.pending
    gate.set()


def test_the_job_passes_straight_through(background):
    seen = []
    background.defer((1,), lambda: seen.append(background.settle(1)))
    background.settle(1)
    assert seen == [None]


def test_jobs_run_in_order_and_settle_waits_for_the_last(background):
    seen = []
    for number in range(20):
        background.defer((1,), lambda number=number: seen.append(number))
    background.settle(1)
    assert seen == list(range(20))
    assert background.pending == {}


@pytest.mark.parametrize("error", [ValueError("oops")])
def test_failing_job_is_logged_and_releases(background, caplog, error):
    def fail():
        raise error

    background.defer((1,), fail)
    background.settle(1)
    assert "deferred work on an engine failed" in caplog.text
    assert "oops" in caplog.text
    background.defer((1,), lambda: None)  # and the thread lives
    background.settle(1)


def test_a_job_may_defer_another(background):
    seen = []
    background.defer((1,), lambda: background.defer((1,), lambda: seen.append("second")))
    while background.pending:
        background.settle(1)
    assert seen == ["second"]


def test_close_finishes_what_is_queued():
    background, seen = BackgroundWork(Collecting()), []
    for _ in range(3):
        background.defer((1,), lambda: (time.sleep(0.01), seen.append(1)))
    background.close()
    assert seen == [1, 1, 1]
    assert background.pending == {}


def test_after_close_work_is_dropped_and_nobody_hangs():
    background, seen = BackgroundWork(Collecting()), []
    background.close()
    background.defer((1,), lambda: seen.append(1))
    background.settle(1)
    assert seen == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_child_closes_what_another_thread_was_closing():
    """A fork may hit that thread anywhere in its wait, even while it holds the flag's lock."""
    background = BackgroundWork(Collecting())
    background.close()
    waits, ends = threading.Event(), threading.Event()

    def wait():
        with background._ended._lock:
            waits.set()
            ends.wait(30)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    assert in_child(background.close) == 0
    ends.set()
    thread.join()


def test_many_threads(background):
    counts = dict.fromkeys(range(8), 0)

    def work(handle):
        for _ in range(100):
            before = counts[handle]
            background.defer((handle,), lambda: counts.__setitem__(handle, counts[handle] + 1))
            background.settle(handle)
            assert counts[handle] == before + 1

    threads = [threading.Thread(target=work, args=(handle,)) for handle in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(counts.values()) == {100}


@pytest.mark.parametrize("is_late", [False, True])
def test_work_that_is_interrupted_while_it_is_queued_is_done_once(background, is_late):
    class Interrupted:
        def __init__(self, line):
            self.line, self.is_new = line, True

        def put(self, job):
            is_new, self.is_new = self.is_new, False
            if is_late or not is_new:
                self.line.put(job)
            if is_new:
                raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(self.line, name)

    seen = []
    background._jobs = Interrupted(background._jobs)
    with pytest.raises(KeyboardInterrupt):
        background.defer((1,), lambda: seen.append(1))
    background.settle(1)
    background.defer((1,), lambda: seen.append(2))
    background.settle(1)
    assert seen == [1, 2]
    assert background.pending == {}


@pytest.mark.parametrize("n_jobs", [0, 1])
def test_ctrl_c_anywhere_in_close_leaves_a_second_close_that_ends(n_jobs):
    for interruption in interruptions(background_module, threading):
        background, seen = BackgroundWork(Collecting()), []
        for _ in range(n_jobs):
            background.defer((1,), lambda seen=seen: seen.append(1))
        with interruption:
            background.close()
        closes = threading.Thread(target=background.close, daemon=True)
        closes.start()
        closes.join(10)
        assert not closes.is_alive(), interruption.where
        assert seen == [1] * n_jobs
