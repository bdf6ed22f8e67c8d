"""Signals wait until a block ends, whichever handlers they have."""

from __future__ import annotations

import signal
import threading

import pytest
from forking import in_child

from llmaas_plugins.signals import signals_wait


@pytest.fixture(autouse=True)
def handlers_as_before():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def usr1():
    """Let SIGUSR1 raise an exception of its own."""

    def stop(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_comes_when_the_outermost_block_ends():
    reached = []

    def work():
        with signals_wait():
            with signals_wait():
                signal.raise_signal(signal.SIGINT)
                reached.append("inside")
            reached.append("between")
        reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["inside", "between"]


def test_every_handler_in_python_waits(usr1):
    reached = []

    def work():
        with signals_wait():
            signal.raise_signal(usr1)
            reached.append("inside")

    with pytest.raises(InterruptedError):
        work()
    assert reached == ["inside"]


def test_an_error_is_not_lost():
    def work():
        with signals_wait():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_other_threads_have_nothing_to_delay():
    found = []

    def run():
        with signals_wait():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
@pytest.mark.parametrize("forks_inside", [True, False], ids=["the block", "another thread"])
def test_a_forked_child_is_not_left_without_handlers(forks_inside):
    before, codes = signal.getsignal(signal.SIGINT), []

    def child():
        if forks_inside:
            assert signal.getsignal(signal.SIGINT) is not before  # it leaves the block itself
        else:
            assert signal.getsignal(signal.SIGINT) is before
            with signals_wait():
                assert signal.getsignal(signal.SIGINT) is not before
            assert signal.getsignal(signal.SIGINT) is before

    def fork():
        codes.append(in_child(child))

    with signals_wait():
        if forks_inside:
            fork()
        else:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
    assert codes == [0]
