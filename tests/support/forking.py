"""Running work in a forked child."""

from __future__ import annotations

import contextlib
import os
import signal


def begin(work, seconds=20):
    """Fork, run ``work`` in the child for at most ``seconds``, and return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            signal.alarm(seconds)
            work()
            code = 0
        os._exit(code)
    return pid


def exit_code(pid):
    """Wait for a child to end and return its exit code, 0 if it raised nothing."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work):
    """Run ``work`` in a forked child, wait for its end and return its exit code."""
    return exit_code(begin(work))
