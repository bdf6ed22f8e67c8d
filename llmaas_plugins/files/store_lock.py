"""Lock that admits one process to a store, with the names of its holder and of database readers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.private_files import PrivateFiles

__all__ = ["folder_lock", "holder", "lock", "readers", "try_lock", "unlock", "user"]

_MOST_BYTES = 400
_SECRET = re.compile(r"(--[\w-]*(?:key|password|secret|token)[= ])\S+")
_GLANCE_S = 0.5
_STEP_S = 0.005
_LOCKS = Path("/proc/locks")
_READ_MARKS = range(120, 128)
"""Bytes of an SQLite ``-shm`` file locked during a transaction; byte 128 is locked while open.
"""


def lock(path: Path, files: PrivateFiles) -> int:
    """Lock the store for this process; return a descriptor for ``unlock``.

    The kernel holds the lock, so it ends with the process, however that ends. ``user`` takes the
    lock for some microseconds, so this function retries for a moment.

    Args:
        path: The lock file in the store's directory.
        files: Rules for opening the store's files.

    Raises:
        StoreError: Another process holds the lock; the message names it.
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
    """Try to lock this descriptor of the lock file; return whether it holds the lock now."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def folder_lock(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Hold a lock on a folder meanwhile, shared or exclusive; yield whether it was obtained."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    is_held = True
    try:
        try:
            fcntl.flock(fd, how)
        except OSError:  # another process has it, or the file system has no locks
            is_held = False
        yield is_held
    finally:
        os.close(fd)


def unlock(fd: int) -> None:
    """Release the lock, and erase the holder's name from the lock file.

    The lock ends even if a child process inherited the descriptor.
    """
    _write(fd, b"")
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def holder(fd: int) -> str:
    """Return the process that the lock file names; the untrusted text is only displayed."""
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
    shown = _discreet("".join(c if c.isprintable() else " " for c in command).strip())
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def user(path: Path, files: PrivateFiles) -> str | None:
    """Return the process that holds the store now, or None.

    Raises:
        StoreError: The lock file is not a regular file.
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

    They are found in the kernel's list of locks, which lacks processes in other containers.
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
    """Return process, inode and first byte of a line of /proc/locks; zeros for other lock types."""
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
    """Write the holder's name for others' messages; ignore errors such as a full disk."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text[:_MOST_BYTES], 0)
    except OSError:
        pass


def _command() -> str:
    return _discreet(" ".join([Path(sys.executable or "python").name, *sys.argv]))


def _discreet(command: str) -> str:
    """Return a command line without the values of options such as ``--api_key``.

    Messages that name a process end up in logs.
    """
    return _SECRET.sub(r"\1…", command)
