"""Signals wait until a block ends, whichever handlers they have."""

from __future__ import annotations

import _signal
import asyncio
import signal
import sys
import textwrap
import threading

import pytest
from commands import run_python
from forking import begin, exit_code, in_child

from llmaas_hooks import forks
from llmaas_plugins.signals import _delay, _note, signals_wait, wait_at_forks


@pytest.fixture(autouse=True)
def handlers_as_before():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


class Told(forks.Forked):
    """Object to which a signal comes while it is told of a fork."""

    def __init__(self, number):
        self.number, self.steps = number, []
        forks.watch(self)

    def before_fork(self):
        signal.raise_signal(self.number)
        self.steps.append("before")

    def after_fork(self, *, in_child):
        self.steps.append("after")


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


def test_all_signals_of_a_block_come(usr1):
    """Those after one whose handler raises an error come, too, and in their order."""
    got = []

    def handle(number, _frame):
        got.append(number)
        raise InterruptedError

    before = [(number, signal.signal(number, handle)) for number in (usr1, signal.SIGTERM)]
    try:
        with pytest.raises(InterruptedError), signals_wait():
            list(map(signal.raise_signal, (signal.SIGTERM, usr1, signal.SIGTERM)))
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert got == [signal.SIGTERM, usr1]


def test_event_loops_see_a_signal_once():
    got = []

    async def wait():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, got.append, "came")
        with signals_wait():
            signal.raise_signal(signal.SIGUSR1)
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    asyncio.run(wait())
    signal.signal(signal.SIGUSR1, before)
    assert got == ["came"]


def test_a_handler_may_use_blocks_while_handlers_are_restored(usr1, monkeypatch):
    real, came = _signal.signal, []

    def handle(*_):
        with signals_wait():
            came.append(dict(_delay.handlers))

    def restore(number, handler):
        before = real(number, handler)
        if number == usr1 and handler is handle:
            signal.raise_signal(usr1)
        return before

    signal.signal(usr1, handle)
    with signals_wait():
        monkeypatch.setattr(_signal, "signal", restore)
    monkeypatch.undo()
    assert len(came) == 1
    assert usr1 in came[0]  # the handler ran in the middle of it
    assert signal.getsignal(usr1) is handle
    assert _delay.handlers == {}


def test_a_handler_that_is_set_meanwhile_stays(usr1):
    def first(*_):
        signal.signal(usr1, second)

    def second(*_):
        """Do nothing."""

    real = signal.signal(usr1, first)
    with signals_wait():
        assert signal.getsignal(usr1) is _note
        signal.signal(usr1, second)
    assert signal.getsignal(usr1) is second
    signal.signal(usr1, real)


def test_a_handler_that_changes_handlers_as_a_block_begins(usr1, monkeypatch):
    real, came = _signal.signal, []

    def handle(*_):
        came.append(True)
        real(usr1, int(signal.SIG_IGN))

    def replace(number, handler):
        if number == usr1 and not came:
            signal.raise_signal(usr1)
        return real(number, handler)

    signal.signal(usr1, handle)
    monkeypatch.setattr(_signal, "signal", replace)
    with signals_wait():
        pass
    monkeypatch.undo()
    assert came == [True]
    assert signal.getsignal(usr1) is signal.SIG_IGN


ALONE = {
    "flags of a handler": """
        import ctypes
        def flags():
            action = (ctypes.c_char * 256)()
            ctypes.CDLL(None).sigaction(int(signal.SIGUSR1), None, action)
            return bytes(action)[:16] + bytes(action)[136:140]  # handler, mask, flags
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.siginterrupt(signal.SIGUSR1, False)
        before = flags()
        with signals_wait():
            assert flags() == before
        assert flags() == before
        """,
    "a handler in C": """
        import faulthandler, os
        faulthandler.register(signal.SIGTERM, open(os.devnull, "w"))
        with signals_wait():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        """,
    "a handler in C before one in Python": """
        import faulthandler, os, tempfile
        came = []
        signal.signal(signal.SIGTERM, lambda *_: came.append(1))
        file = tempfile.TemporaryFile()
        faulthandler.register(signal.SIGTERM, file, chain=True)
        with signals_wait():
            signal.raise_signal(signal.SIGTERM)
            assert not came
        signal.raise_signal(signal.SIGTERM)
        assert came == [1, 1]
        file.seek(0)
        assert file.read().count(b"most recent call first") == 2
        """,
    "ignored signals in children of other threads": """
        import subprocess, sys, threading
        found = []
        def child():
            code = "import signal; print(signal.getsignal(signal.SIGINT))"
            found.append(subprocess.check_output([sys.executable, "-S", "-c", code]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for block in (contextlib.nullcontext, signals_wait):
            with block():
                thread = threading.Thread(target=child)
                thread.start()
                thread.join()
        assert found[0] == found[1] == b"1\\n", found
        """,
}


@pytest.mark.parametrize("code", ALONE.values(), ids=ALONE)
def test_as_without_a_block(code):
    preamble = "import contextlib, signal\nfrom llmaas_plugins.signals import signals_wait\n"
    run_python(sys.executable, "-c", preamble + textwrap.dedent(code))


def test_a_process_whose_main_thread_is_not_that_of_threading():
    code = """
        import _thread, os, sys, time
        def run():
            from llmaas_plugins.signals import signals_wait
            with signals_wait():
                pass
            os._exit(0)
        sys.modules.pop("threading", None)  # the thread that imports it is its main thread
        _thread.start_new_thread(run, ())
        time.sleep(60)
        os._exit(1)
        """
    run_python(sys.executable, "-c", textwrap.dedent(code))


def test_a_signal_during_a_fork_is_the_parents_and_comes_after_it():
    wait_at_forks()
    told = Told(signal.SIGUSR1)
    former = signal.signal(signal.SIGUSR1, lambda *_: told.steps.append("handled"))

    def check():
        assert told.steps == ["before", "after"]
        signal.raise_signal(signal.SIGUSR1)
        assert told.steps.pop() == "handled"

    try:
        assert in_child(check) == 0
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert told.steps == ["before", "after", "handled"]


def test_ctrl_c_during_a_fork_comes_after_it():
    wait_at_forks()
    told, pids = Told(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  it comes after the fork
        pids.append(begin(lambda: None))
        threading.Event().wait(10)
    assert told.steps == ["before", "after"]
    assert [exit_code(pid) for pid in pids] == [0]


def test_what_a_handler_raises_during_a_fork_is_raised_after_it(usr1):
    wait_at_forks()
    told, pids = Told(usr1), []
    for _ in range(2):
        with pytest.raises(InterruptedError):  # noqa: PT012  it comes after the fork
            pids.append(begin(lambda: None))
            threading.Event().wait(10)
    assert told.steps == 2 * ["before", "after"]
    assert [exit_code(pid) for pid in pids] == [0, 0]
