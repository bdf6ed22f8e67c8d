"""Facts about a context that several threads change."""

from __future__ import annotations

import threading

from llmaas_patches.background import BackgroundWork
from llmaas_patches.cell_tracker import CellTracker
from llmaas_patches.collecting import Collecting


def test_plugins_sequences_are_freed_after_calls_of_two_threads_that_overlapped():
    tracker = CellTracker((1, 2), 1, 64)
    background, app = tracker.in_call(), tracker.in_call()
    background.__enter__()
    app.__enter__()
    tracker.must_free_parked = True
    background.__exit__(None, None, None)
    tracker.free_at_end()
    assert tracker.must_free_parked  # the app's call is still running
    app.__exit__(None, None, None)
    tracker.free_at_end()
    assert not tracker.must_free_parked


def test_a_plugins_calls_do_not_begin_inside_deferred_work():
    """Its end would make them look like the app's, which may not name a plugin's sequence."""
    background = BackgroundWork(Collecting())
    tracker = CellTracker((1, 2), 1, 64, lambda: background.settle(1))
    has_begun, may_end = threading.Event(), threading.Event()

    def job():
        with tracker.lent():
            has_begun.set()
            may_end.wait(20)

    background.defer(tracker.handles, job)
    has_begun.wait(20)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    with tracker.lent():
        assert may_end.is_set()
        assert tracker.is_lent
    assert not tracker.is_lent
    background.close()
    timer.join()
