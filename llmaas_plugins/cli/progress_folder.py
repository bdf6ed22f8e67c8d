"""Folder in which a long command keeps its progress, beside its result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.store_lock import try_lock

__all__ = ["progress_folder", "remove_progress"]


@contextlib.contextmanager
def progress_folder(folder: Path) -> Iterator[None]:
    """Make a folder for progress if it is missing, and keep other runs out of it in the block.

    The folder is removed at the end of the block if it is empty then.

    Raises:
        StoreError: The folder cannot be made, or another run uses it.
    """
    with as_store_error(f"cannot make {folder}"):
        fd = _locked(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()
        os.close(fd)


def remove_progress(folder: Path, used: Iterable[Path], shared: Iterable[Path]) -> None:
    """Remove the files of a run that is complete.

    Args:
        folder: Folder for progress, which earlier runs and the user may have used, too.
        used: Files that only this run can use.
        shared: Files that other runs may use, too, such as text that the model wrote. They stay
            while there are checkpoints of other runs.
    """
    with contextlib.suppress(OSError):  # the result is written; what is left does no harm
        for path in used:
            path.unlink(missing_ok=True)
        if not any(folder.glob("*.npz")):
            for path in shared:
                path.unlink(missing_ok=True)


# -- internals -----------------------------------------------------------------------------------


def _locked(folder: Path) -> int:
    """Make and lock a folder, again if a run that ends has just removed it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not try_lock(fd):
            os.close(fd)
            raise StoreError(f"another run uses {folder}: wait until it ends, or stop it.")
        if _is_at(fd, folder):
            return fd
        os.close(fd)


def _is_at(fd: int, folder: Path) -> bool:
    """Return whether a path still leads to an open folder."""
    try:
        return os.path.samestat(os.fstat(fd), folder.stat())
    except FileNotFoundError:
        return False
