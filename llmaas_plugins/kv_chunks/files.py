"""The files of a store: its own, private, and really files. Nothing is followed out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = [
    "INDEX",
    "LOCK",
    "SLAB",
    "UNUSABLE",
    "is_regular",
    "make_private",
    "open_private",
    "private_directory",
    "require_store",
]

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


def require_store(directory: Path) -> None:
    """Refuse a directory that holds no store.

    Raises:
        StoreError: There is no index in it.
    """
    if not os.path.lexists(directory / INDEX):
        raise StoreError(
            f"there is no KV store in {directory}. Name its directory with --store, or in "
            "plugins.kv_chunks.store."
        )


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a regular file; a link, a pipe or a directory is refused.

    Unless it is only read, its mode is 0600 from now on.

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
        if flags & os.O_RDWR:
            _tighten(path, mode, 0o600)
    except StoreError:
        os.close(fd)
        raise
    return fd


def is_regular(path: Path) -> bool:
    """Whether the file exists. It is not opened.

    (Closing a descriptor of an SQLite file would drop the locks this process has on it.)

    Raises:
        StoreError: It is something else than a regular file.
    """
    return _mode(path) is not None


def make_private(path: Path) -> bool:
    """Whether the file exists; its mode is 0600 then. It is not opened.

    Raises:
        StoreError: It is something else than a regular file, or cannot be made private.
    """
    mode = _mode(path)
    if mode is not None:
        _tighten(path, mode, 0o600)
    return mode is not None


def _mode(path: Path) -> int | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path.parent, error) from error
    if not stat.S_ISREG(mode):
        raise _odd(path)
    return mode


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
