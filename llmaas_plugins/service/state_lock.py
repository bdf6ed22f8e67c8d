"""Exclusive use of a state folder: one service at a time, across processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["StateLock"]


class StateLock:
    """A lock on a state folder, held until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Lock ``directory``, which is created if needed.

        Raises:
            StoreError: The directory cannot be used, or another service uses it.
        """
        directory = directory.expanduser()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.release = weakref.finalize(self, _release, descriptor, os.getpid())
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreError(
                f"another service uses {directory}. Stop it, or set service.state_dir to another "
                "directory."
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot use service.state_dir {directory}: {error.strerror}. Set it to a "
                "directory you may write to."
            ) from error


def _release(descriptor: int, owner: int) -> None:
    """Unlock the folder explicitly: a forked child may hold a copy of the descriptor.

    The child only closes its copy, which keeps the parent's lock.
    """
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
