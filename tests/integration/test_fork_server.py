"""The tests' forked processes do what interpreters of their own would do."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import fork_server
import pytest
from forking import begin, exit_code

SEES = """
import json, os, signal, sys
handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) > 2]
files = [file for file in files if os.path.exists(file) and file != os.devnull]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path[:3], "folder": os.getcwd(), "environ": dict(os.environ),
    "stdin": sys.stdin.read(), "handler": handler, "files": files,
    "tasks": len(os.listdir("/proc/self/task")), "session": os.getsid(0) == os.getpid(),
}))
"""
ENDS = {
    "the last line": "",
    "a status": "sys.exit(3)",
    "a message": "sys.exit('no luck')",
    "an exception": "1 / 0",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "at once": "os._exit(4)",
}
WAITS = """
import atexit, os, signal, sys, threading

class Kept:
    def __del__(self, write=os.write):
        write(1, b"freed\\n")

sys.modules["kept"] = Kept()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
"""


@pytest.fixture
def both(tmp_path):
    """Return a function that runs a command both ways, and gives both ends and outputs."""
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:/nowhere", "MINE": "ä\n"}

    def run(*arguments, said="", **options):
        found = []
        for start in (subprocess.Popen, fork_server.Process):
            with start(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **options,
            ) as process:
                stdout, stderr = process.communicate(said, timeout=60)
            found.append((process.returncode, stdout, stderr))
        return found

    return run


@pytest.mark.parametrize("has_session", [False, True])
def test_it_sees_the_same(both, tmp_path, has_session):
    (tmp_path / "sees.py").write_text(SEES)
    for arguments in (["-c", SEES, "a b", ""], ["-m", "sees", "-v"]):
        own, forked = both(*arguments, said="said", start_new_session=has_session)
        assert (own[0], own[2]) == (forked[0], forked[2]) == (0, "")
        assert json.loads(own[1]) == json.loads(forked[1])
        assert json.loads(own[1])["stdin"] == "said"


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_the_same(both, end):
    own, forked = both("-c", WAITS + ENDS[end])
    assert own[:2] == forked[:2]
    assert own[2].splitlines()[-1:] == forked[2].splitlines()[-1:]


def test_one_that_waits_and_one_that_is_killed():
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with fork_server.Process(waiting, stdin=subprocess.PIPE) as first:
        with fork_server.Process(waiting, stdin=subprocess.PIPE) as second:
            assert (first.poll(), second.poll()) == (None, None)
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(0)
            second.kill()
            assert (second.wait(60), second.poll(), first.poll()) == (-signal.SIGKILL, -9, None)
        first.stdin.close()
        assert first.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_told_to_end_at_once(number):
    """Python only notes a signal that comes just before a read, which then waits for its file."""
    command = [sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"]
    options = {"stderr": subprocess.DEVNULL, "start_new_session": True}
    with fork_server.Process(command, **options) as process:
        os.killpg(process.pid, number)
        assert process.wait(60) == -number


def test_the_server_ends_with_its_user_and_kills_what_is_left():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve():
        ours.close()
        if fork_server._serve(theirs) is not None:
            threading.Event().wait()

    server = begin(serve)
    theirs.close()
    socket.send_fds(ours, [b'{"has_session": false}'], [0, 1, 2])
    child = os.pidfd_open(json.loads(ours.recv(100)))
    ours.close()
    assert exit_code(server) == 0
    assert select.select([child], [], [], 60)[0]
    os.close(child)
