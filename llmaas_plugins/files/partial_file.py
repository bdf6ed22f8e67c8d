"""Partial files, which one process at a time writes until they are complete."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, sync_directory, write
from llmaas_plugins.files.store_lock import try_lock

__all__ = ["foreseen", "replaced", "replacing", "taken", "write_bytes"]


@contextlib.contextmanager
def taken(partial: Path) -> Iterator[int]:
    """Open a partial file that no other process can write meanwhile.

    Raises:
        StoreError: Another process writes the file, or it is not a regular file.
        OSError: The file cannot be opened.
    """
    fd = _locked(partial)
    while not _is_named(fd, partial):  # the previous holder has just renamed it
        os.close(fd)
        fd = _locked(partial)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Yield the descriptor of an empty partial file that replaces a file when the block ends.

    If the block raises, the existing file stays unchanged. The new file keeps its permissions.

    Raises:
        StoreError: The file cannot be written, or another process writes it.
    """
    partial = _partial_of(path)
    with as_store_error(f"cannot write {path}"), taken(partial) as fd, _removed(partial):
        os.ftruncate(fd, 0)
        mode = _mode_of(path)
        if mode is not None:
            os.fchmod(fd, _PRIVATE)  # a mode without writing would keep the next process out
        yield fd
        if mode is not None:
            os.fchmod(fd, mode)
        os.fsync(fd)
        partial.replace(path)
        sync_directory(path.parent)


@contextlib.contextmanager
def foreseen(path: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a file was written by ``replacing`` in the block.

    That may be in another process. The partial file is made beforehand, so its inode is known. The
    function returns False for a file that somebody else put there, and after a second replacement.

    Raises:
        StoreError: The partial file cannot be opened.
    """
    partial = _partial_of(path)
    with as_store_error(f"cannot write {path}"):
        fd = _opened(partial)
    try:
        yield lambda: _is_named(fd, path)
    finally:
        if not os.fstat(fd).st_size and try_lock(fd) and _is_named(fd, partial):
            partial.unlink(missing_ok=True)
        os.close(fd)


def replaced(
    path: Path,
    contents: Iterable[bytes | memoryview],
    finish: Callable[[int], None] = lambda _fd: None,
) -> Iterator[int]:
    """Write a whole file, or leave an existing one unchanged; yield the numbers of bytes written.

    The file keeps the permissions of an existing one.

    Args:
        path: Path of the file.
        contents: Bytes of the file, in pieces.
        finish: Called with the partial file's descriptor when all pieces are written; an error that
            it raises leaves the existing file unchanged.

    Raises:
        StoreError: The file cannot be written, or another process writes it.
    """
    n_written = 0
    with replacing(path) as fd:
        for content in contents:
            write(fd, content, n_written)
            n_written += len(content)
            yield len(content)
        finish(fd)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file, or leave an existing one unchanged.

    Raises:
        StoreError: The file cannot be written, or another process writes it.
    """
    for _ in replaced(path, [content]):
        pass


# -- inside --------------------------------------------------------------------------------------

_PRIVATE = 0o600


def _mode_of(path: Path) -> int | None:
    """Return the permissions of a file; None if there is no file."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _removed(partial: Path) -> Iterator[None]:
    """Remove the partial file on any error: a full disk may be the cause."""
    try:
        yield
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _opened(partial: Path) -> int:
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | OPEN_FLAGS, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{partial} is not a regular file; remove it.")
    return fd


def _locked(partial: Path) -> int:
    fd = _opened(partial)
    if not try_lock(fd):
        os.close(fd)
        raise StoreError(f"{partial} is being written by another process: wait for it, or stop it.")
    return fd


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
