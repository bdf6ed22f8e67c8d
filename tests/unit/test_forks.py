"""Notifications about forks, while other threads create the objects to be notified."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import pytest

from llmaas_hooks import forks


class Counting(forks.Forked):
    def __init__(self):
        self.told = []

    def before_fork(self):
        self.told.append("before")

    def after_fork(self, *, in_child):
        self.told.append("after")


@pytest.fixture
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_all_are_told_while_other_threads_add_some():
    ones, is_over = [Counting() for _ in range(300)], threading.Event()
    for one in ones:
        forks.watch(one)

    def add():
        while not is_over.is_set():
            for one in [Counting() for _ in range(50)]:
                forks.watch(one)

    n = 300
    with contextlib.ExitStack() as ended:
        thread = threading.Thread(target=add)
        ended.callback(thread.join)
        ended.callback(is_over.set)
        thread.start()
        for _ in range(n):
            forks._before()
            forks._after(in_child=False)
    assert all(one.told == ["before", "after"] * n for one in ones)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_child_knows_that_it_is_one():
    assert not forks.is_child()
    child = os.fork()
    if child == 0:
        os._exit(0 if forks.is_child() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not forks.is_child()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_what_is_gone_is_told_nothing():
    one, other = Counting(), Counting()
    forks.watch(one)
    forks.watch(other)
    told = other.told
    del other
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert (one.told, told) == (["before", "after"], [])
