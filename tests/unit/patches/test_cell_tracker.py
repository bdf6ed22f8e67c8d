"""Facts about a context that several threads change."""

from __future__ import annotations

from llmaas_patches.cell_tracker import CellTracker


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
