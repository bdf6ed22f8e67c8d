"""The files of a store: its own, private, and really files. Nothing is followed out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["INDEX", "LOCK", "SLAB", "UNUSABLE", "make_private", "open_private", "private_directory"]

LOCK = "lock"
INDEX = "index.sqlite"
SLAB = "chunks.slab"
UNUSABLE = "index.sqlite.unusable"
_NAMES = {LOCK, SLAB, UNUSABLE, *(INDEX + suffix for suffix in ("", "-wal", "-shm", "-journal"))}
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_NEXT = "Set plugins.kv_chunks.store to a directory"


def private_directory(directory: Path) -> None:
    """Make ``directory``, or make the one that is there private, mode 0700.

    One that holds other files, too, keeps its mode: what is in it may be meant for others.

    Raises:
        StoreError: It cannot be made or made private, or others may replace files in it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if not mode & _OTHERS:
            return
        is_own = all(entry.name in _NAMES for entry in directory.iterdir())
    except OSError as error:
        raise _refused(directory, error) from error
    if is_own:
        _tighten(directory, mode, 0o700)
    elif mode & _OTHERS_WRITE:
        raise StoreError(
            f"cannot use KV store {directory}: other users may write to it (mode {mode:04o}), and "
            f"it holds other files, too. {_NEXT} of its own."
        )


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a regular file, mode 0600; a link, a pipe or a directory is refused.

    Raises:
        StoreError: It is something else, or cannot be opened or made private.
    """
    try:  # a pipe would otherwise wait for its other end
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise _odd(path) from error
        raise _refused(path.parent, error) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _odd(path)
    try:
        _tighten(path, mode, 0o600)
    except StoreError:
        os.close(fd)
        raise
    return fd


def make_private(path: Path) -> bool:
    """Whether the file exists; it is a regular one and of mode 0600 then. It is not opened.

    (Closing a descriptor of an SQLite file would drop the locks this process has on it.)

    Raises:
        StoreError: It is something else, or cannot be made private.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _refused(path.parent, error) from error
    if not stat.S_ISREG(mode):
        raise _odd(path)
    _tighten(path, mode, 0o600)
    return True


def _tighten(path: Path, found: int, mode: int) -> None:
    if not found & _OTHERS:
        return
    try:
        path.chmod(mode)
    except OSError as error:
        raise StoreError(
            f"cannot use KV store: {path} is open to other users and cannot be made private: "
            f"{error.strerror}. {_NEXT} of your own."
        ) from error


def _odd(path: Path) -> StoreError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return StoreError(
        f"cannot use KV store {path.parent}: {path.name} is {kind}. Remove it, or set "
        "plugins.kv_chunks.store to another directory."
    )


def _refused(directory: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot use KV store {directory}: {error.strerror}. {_NEXT} you may write to."
    )
