"""Who may use a state folder: one service at a time, in whatever process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["Claim"]


class Claim:
    """A state folder for one service alone, until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Take ``directory``, which is made if it is not there.

        Raises:
            StoreError: It cannot be used, or another service has it.
        """
        directory = directory.expanduser()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.release = weakref.finalize(self, _release, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreError(
                f"another service uses {directory}. Stop it, or set service.state_dir to another "
                "directory."
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot use service.state_dir {directory}: {error.strerror}"
            ) from error


def _release(descriptor: int) -> None:
    """Unlock, and not only close: a forked child may have the descriptor, too."""
    with contextlib.suppress(OSError):  # there are no locks here
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
