"""A command under limits of time and memory, with what it took."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmaas_plugins.signals import signals_wait

__all__ = ["Limits", "Watched", "watch"]

_POLL_S = 0.1
_MOST_TEXT = 1 << 16
_BREAK = re.compile(r"[\r\n]+|\x1b\[[0-9;]*[A-Za-z]")
_KIB = 1024
_WINDOW = (24, 120)
"""Rows and columns of the terminal; without any, progress bars would be hidden."""


class Limits(NamedTuple):
    """Limits of a command.

    Attributes:
        seconds: Longest time.
        private_bytes: Most memory of each process that is no mapped file.
    """

    seconds: float
    private_bytes: int


class Watched(NamedTuple):
    """Time, memory and output of a command.

    Attributes:
        status: Exit status, negative for a signal; None if the time was over.
        seconds: Time.
        private_bytes: Largest memory of its processes that is no mapped file.
        resident_bytes: Largest resident memory of its processes, with mapped files.
        read_bytes: Bytes that it read with system calls, not through mapped files.
        silent_s: Longest time without any output, as on a terminal.
        said: End of its output, in lines.
    """

    status: int | None
    seconds: float
    private_bytes: int
    resident_bytes: int
    read_bytes: int
    silent_s: float
    said: tuple[str, ...]


def watch(command: Sequence[str], env: Mapping[str, str], folder: Path, limits: Limits) -> Watched:
    """Run a command on a terminal of its own, so that it shows progress bars.

    Args:
        command: Program and arguments.
        env: Environment.
        folder: Working directory.
        limits: Limits; a command that reaches the limit of time is killed.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, _WINDOW)
    process: subprocess.Popen[bytes] | None = None
    try:
        try:
            with signals_wait():  # else Ctrl-C could lose a process that has begun
                process = subprocess.Popen(  # noqa: S603  the arguments are our own
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=theirs,
                    env=dict(env),
                    cwd=folder,
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (limits.private_bytes,) * 2)
        return _watched(process, ours, limits)
    finally:
        os.close(ours)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- inside --------------------------------------------------------------------------------------


class _Peaks:
    """Largest figures of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.private = self.resident = self.read = 0

    def look(self) -> None:
        private = resident = n_read = 0
        for pid in _family(self._pid):
            status = _fields(Path(f"/proc/{pid}/status"))
            private += status.get("RssAnon", 0) * _KIB
            resident += status.get("VmRSS", 0) * _KIB
            n_read += _fields(Path(f"/proc/{pid}/io")).get("rchar", 0)  # with ended children's
        self.private, self.resident = max(private, self.private), max(resident, self.resident)
        self.read = max(n_read, self.read)


def _watched(process: subprocess.Popen[bytes], terminal: int, limits: Limits) -> Watched:
    peaks, said, silent_s = _Peaks(process.pid), b"", 0.0
    started = heard = time.monotonic()
    while True:
        has_ended = process.poll() is not None
        is_readable = bool(select.select([terminal], [], [], 0 if has_ended else _POLL_S)[0])
        content = _read(terminal) if is_readable else b""
        now = time.monotonic()
        silent_s = max(silent_s, now - heard)
        if content:
            said, heard = (said + content)[-_MOST_TEXT:], now
        if (has_ended and not content) or now - started > limits.seconds:
            break
        peaks.look()
    lines = (line.strip() for line in _BREAK.split(said.decode(errors="replace")))
    return Watched(
        process.returncode if has_ended else None,
        now - started,
        peaks.private,
        peaks.resident,
        peaks.read,
        silent_s,
        tuple(line for line in lines if line),
    )


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, _MOST_TEXT)
    except OSError:  # all processes closed the terminal
        time.sleep(_POLL_S)
        return b""


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _family(int(child))


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file below ``/proc``; none if it is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    parts = (line.replace(":", " ").split() for line in lines)
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isdigit()}
