"""Attributes that are created on first use."""

from __future__ import annotations

import threading

from forking import in_child

from llmaas_plugins.lazy import lazy


class Thing:
    n_made = 0

    def __init__(self):
        self.is_making, self.may_end = threading.Event(), threading.Event()

    @lazy
    def slow(self):
        """Simulate a slow thread."""
        if threading.current_thread() is not threading.main_thread():
            self.is_making.set()
            self.may_end.wait()
        self.n_made += 1
        return object()


def test_it_is_made_once():
    thing = Thing()
    assert thing.slow is thing.slow
    assert (thing.n_made, list(vars(thing))[-2:]) == (1, ["n_made", "slow"])


def test_a_child_makes_what_another_thread_was_making():
    thing = Thing()
    thread = threading.Thread(target=lambda: thing.slow)
    thread.start()
    thing.is_making.wait()
    code = in_child(lambda: thing.slow)
    thing.may_end.set()
    thread.join()
    assert code == 0
