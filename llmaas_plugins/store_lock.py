"""One process a store: the lock, who has it, and who reads a database in it."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.private_files import PrivateFiles

__all__ = ["holder", "lock", "readers", "try_lock", "unlock", "user"]

_MOST_BYTES = 400
_GLANCE_S = 0.5
_STEP_S = 0.005
_LOCKS = Path("/proc/locks")
_READ_MARKS = range(120, 128)
"""Bytes of an SQLite ``-shm`` file that are locked while a transaction runs; 128: while open."""


def lock(path: Path, files: PrivateFiles) -> int:
    """Take the store for this process; a descriptor for ``unlock``.

    The lock is the kernel's: it ends with its process, however that ends. Whoever asks ``user``
    has it for some microseconds, so it is tried for a moment.

    Args:
        path: The lock file in the store's directory.
        files: How such a store opens its files.

    Raises:
        StoreError: Somebody has it; the message says who.
    """
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _GLANCE_S
    while not (has_it := try_lock(fd)) and time.monotonic() < deadline:
        time.sleep(_STEP_S)
    if not has_it:
        who = holder(fd)
        os.close(fd)
        raise StoreError(
            f"{files.kind} {path.parent} is in use by {who}. "
            f"Stop it, or set {files.setting} to another directory."
        )
    _write(fd, f"{os.getpid()}\n{_command()}\n".encode(errors="replace"))
    return fd


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether this descriptor of the lock file holds the lock now."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    """Let go, leaving no name behind; a child that has the descriptor, too, does not keep it."""
    _write(fd, b"")
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def holder(fd: int) -> str:
    """Who says to hold the lock, from the file; nothing in it is believed further than that."""
    try:
        text = os.pread(fd, _MOST_BYTES, 0).decode(errors="replace")
    except OSError:
        text = ""
    pid, _, command = text.partition("\n")
    if not (pid.isascii() and pid.isdigit()):
        return "another process"
    if int(pid) == os.getpid():
        return "this process already"
    return _shown(int(pid), command)


def _shown(pid: int, command: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in command).strip()
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def user(path: Path, files: PrivateFiles) -> str | None:
    """Who has the store at this moment, or None.

    Raises:
        StoreError: The lock file is something else than a file.
    """
    if not os.path.lexists(path):
        return None
    fd = files.open(path, os.O_RDONLY)
    try:
        return None if try_lock(fd, fcntl.LOCK_SH) else holder(fd)
    finally:
        os.close(fd)


def readers(database: Path) -> list[str]:
    """Return the processes that are in a transaction on an SQLite database in WAL mode.

    The kernel's list of locks says so; processes in other containers are not on it.
    """
    try:
        inode = database.with_name(database.name + "-shm").stat().st_ino
        lines = _LOCKS.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    locks = map(_posix_lock, lines)
    pids = {pid for pid, at, start in locks if at == inode and start in _READ_MARKS}
    return [_named(pid) for pid in sorted(pids)]


def _posix_lock(line: str) -> tuple[int, int, int]:
    """Process, inode and first byte of a line of /proc/locks; zeros if it is of another kind."""
    words = line.split()
    if len(words) != 8 or words[1] != "POSIX" or not words[4].isdigit():
        return 0, 0, 0
    return int(words[4]), int(words[5].rpartition(":")[2]), int(words[6])


def _named(pid: int) -> str:
    if pid == os.getpid():
        return "this process itself"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()[:_MOST_BYTES].decode(errors="replace")
    except OSError:
        command = ""
    return _shown(pid, command)


def _write(fd: int, text: bytes) -> None:
    """Only for whoever is refused, so a full disk is no reason to give up."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text[:_MOST_BYTES], 0)
    except OSError:
        pass


def _command() -> str:
    return " ".join([Path(sys.executable or "python").name, *sys.argv])
