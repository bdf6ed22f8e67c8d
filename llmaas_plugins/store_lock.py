"""One process a store: the lock, and who has it."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.private_files import PrivateFiles

__all__ = ["holder", "lock", "try_lock", "unlock", "user"]

_MOST_BYTES = 400


def lock(path: Path, files: PrivateFiles) -> int:
    """Take the store for this process; a descriptor for ``unlock``.

    The lock is the kernel's: it ends with its process, however that ends.

    Args:
        path: The lock file in the store's directory.
        files: How such a store opens its files.

    Raises:
        StoreError: Somebody has it; the message says who.
    """
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    if not try_lock(fd):
        who = holder(fd)
        os.close(fd)
        raise StoreError(
            f"{files.kind} {path.parent} is in use by {who}. "
            f"Stop it, or set {files.setting} to another directory."
        )
    _write(fd, f"{os.getpid()}\n{_command()}\n".encode(errors="replace"))
    return fd


def try_lock(fd: int) -> bool:
    """Whether this descriptor of the lock file holds the lock now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        return None if try_lock(fd) else holder(fd)
    finally:
        os.close(fd)


def _write(fd: int, text: bytes) -> None:
    """Only for whoever is refused, so a full disk is no reason to give up."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text[:_MOST_BYTES], 0)
    except OSError:
        pass


def _command() -> str:
    return " ".join([Path(sys.executable or "python").name, *sys.argv])
