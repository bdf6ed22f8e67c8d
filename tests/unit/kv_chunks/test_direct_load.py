"""Work that the threads of a load share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmaas_plugins.kv_chunks.transfer.direct_load import _run_shared


def test_results_are_by_index():
    with ThreadPoolExecutor(2) as threads:
        assert _run_shared(threads, lambda i: 10 * i, [2, 0, 1]) == [0, 10, 20]


def test_an_error_in_another_thread_is_raised_here():
    has_failed, caller = threading.Event(), threading.get_ident()

    def work(_):
        if threading.get_ident() == caller:
            assert has_failed.wait(30)
            return 0
        has_failed.set()
        raise ZeroDivisionError

    with ThreadPoolExecutor(1) as threads, pytest.raises(ZeroDivisionError):
        _run_shared(threads, work, range(8))


def test_no_work_runs_when_a_submission_has_failed():
    """A pool may queue a job, give it to a thread, and then fail."""
    has_started, may_end, running = threading.Event(), threading.Event(), []

    class Threads:
        def submit(self, job, *args):
            threading.Thread(target=job, args=args).start()
            assert has_started.wait(30)
            raise MemoryError

    def work(i):
        running.append(i)
        has_started.set()
        assert may_end.wait(30)
        running.remove(i)
        return i

    threading.Timer(0.2, may_end.set).start()
    with pytest.raises(MemoryError):
        _run_shared(Threads(), work, range(3))
    assert not running
