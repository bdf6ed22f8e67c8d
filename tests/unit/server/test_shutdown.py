"""Signals end the process of a service, even if something in it hangs."""

from __future__ import annotations

import signal
import subprocess
import sys

import fork_server
import pytest

SCRIPT = """
import ctypes, sys, threading
from llmaas_plugins.server import shutdown as module
module._WRITING_S, module._AT_ONCE_S = {writing}, {at_once}

with module.Shutdown(0.0) as ending:
    if {asks}:
        ending.ask(lambda: print("told", flush=True))
    threading.Thread(target=ctypes.CDLL(None).sleep, args=(600,)).start()  # knows of no signals
    print("runs", flush=True)
    ctypes.CDLL(None).pause() if {hangs_in_main} else None
    while {hangs_in_main}:
        ctypes.CDLL(None).sleep(600)
    sys.stdin.read(1)
print("left", flush=True)
"""


@pytest.fixture
def start():
    processes = []

    def start(*, asks=True, writing=600.0, at_once=600.0, hangs_in_main=True):
        script = SCRIPT.format(
            asks=asks, writing=writing, at_once=at_once, hangs_in_main=hangs_in_main
        )
        process = fork_server.Process(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "runs\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_was_begun(start, number):
    process = start(asks=False)
    process.send_signal(number)
    assert process.wait(60) == 0


def test_one_signal_gives_some_time(start):
    process = start(writing=0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert process.stdout.read() == "told\n"
    (line,) = process.stderr.read().splitlines()
    assert line.startswith("llmaas: ended without waiting any longer: something still runs 0.3 s")


@pytest.mark.parametrize("limits", [{"at_once": 0.1}, {}])
def test_more_signals_give_less(start, limits):
    process = start(**limits)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        assert process.stdout.readline() == "told\n"
    if not limits:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1


def test_a_thread_that_hangs_at_the_very_end(start):
    process = start(writing=0.3, hangs_in_main=False)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told\n"
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "left\n"
    assert process.wait(60) == 1


LEAVING = """
import atexit, os, sys
from llmaas_plugins.server import shutdown as module
module._AT_ONCE_S = 600.0

def reach(moment, write=os.write, read=os.read):
    write(1, moment.encode() + b"\\n")
    read(0, 1)

class AtTheVeryEnd:
    def __del__(self, reach=reach):
        reach("finalization")

sys.modules["kept"] = AtTheVeryEnd()
atexit.register(reach, "atexit")
with module.Shutdown(0.0) as ending:
    ending.ask(lambda: os.write(1, b"told\\n"))
    reach("inside")
reach("outside")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["inside", "outside", "atexit", "finalization"])
@pytest.mark.slow
def test_a_second_signal_at_any_moment_ends_it_with_the_same_status(number, moment):
    with subprocess.Popen(
        [sys.executable, "-c", LEAVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for reached in ("inside", "outside", "atexit", "finalization"):
            assert process.stdout.readline() == f"{reached}\n"
            if reached == "inside":
                process.send_signal(number)
                assert process.stdout.readline() == "told\n"
            if reached == moment:
                process.send_signal(number)
                if moment != "inside":
                    break  # the process hangs there, and must end nevertheless
                assert process.stdout.readline() == "told\n"
            process.stdin.write("x")
            process.stdin.flush()
        assert process.wait(60) == 0


def test_signals_are_left_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    from llmaas_plugins.server.shutdown import Shutdown

    with Shutdown(0.0):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
