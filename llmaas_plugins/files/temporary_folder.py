"""Temporary folders, of which later processes remove those that killed ones left.

A process holds a lock on its folder as long as it lives, and the kernel ends the lock with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.store_lock import folder_lock, try_lock

__all__ = ["folder_beside", "locked_folder", "remove_leftovers"]

_BESIDE = ".llmaas-beside-"


@contextlib.contextmanager
def folder_beside(path: Path, then: str = "") -> Iterator[Path]:
    """Make a temporary folder beside a file that is to be written; remove it at the end.

    Args:
        path: Path of the file.
        then: Advice for the error message.

    Raises:
        StoreError: The folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with as_store_error(f"cannot write beside {path}", then):
            folder = stack.enter_context(locked_folder(path.parent, _BESIDE))
        yield folder


@contextlib.contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary folder; remove it at the end, and those that killed processes left.

    Args:
        parent: Folder to make it in.
        prefix: Beginning of its name, as nobody else names folders.
    """
    remove_leftovers(parent, prefix)
    with contextlib.ExitStack() as stack:
        yield _locked(parent, prefix, stack)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the temporary folders that killed processes of this user left."""
    ours = re.compile(re.escape(prefix) + r"\w{8}")
    with contextlib.suppress(OSError):  # there is no such folder, or it cannot be listed
        for folder in [one for one in parent.iterdir() if ours.fullmatch(one.name)]:
            _remove_left(folder)


# -- inside --------------------------------------------------------------------------------------


def _locked(parent: Path, prefix: str, stack: contextlib.ExitStack) -> Path:
    """Make and lock a folder, again if another process has just taken it for one that was left."""
    while True:
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        folder = Path(made.name)
        with contextlib.suppress(FileNotFoundError):
            stack.enter_context(folder_lock(folder))
            if folder.exists():
                return Path(stack.enter_context(made))
        made.cleanup()


def _remove_left(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone, or another user's
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.getuid() and try_lock(fd):
                shutil.rmtree(folder)
        finally:
            os.close(fd)
