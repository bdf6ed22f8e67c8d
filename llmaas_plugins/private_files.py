"""Files of a store that are its own, private, and really files. Nothing is followed out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError

__all__ = ["PrivateFiles"]

_OTHERS = 0o077
_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class PrivateFiles:
    """How one kind of store opens its files.

    Attributes:
        kind: What messages call such a store.
        setting: The setting that says where it is.
        is_own: Whether a file of this name can be one of its files.
    """

    kind: str
    setting: str
    is_own: Callable[[str], bool]

    def directory(self, directory: Path) -> None:
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
            is_own = all(self.is_own(entry.name) for entry in directory.iterdir())
        except OSError as error:
            raise self._refused(directory, error) from error
        if is_own:
            self._tighten(directory, mode, 0o700)
        elif mode & _OTHERS_WRITE:
            raise StoreError(
                f"cannot use {self.kind} {directory}: other users may write to it "
                f"(mode {mode:04o}), and it holds other files, too. {self._elsewhere()} of its own."
            )

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a regular file; a link, a pipe or a directory is refused.

        Unless it is only read, its mode is 0600 from now on.

        Raises:
            StoreError: It is something else, or cannot be opened or made private.
        """
        try:  # a pipe would otherwise wait for its other end
            fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise self._odd(path) from error
            raise self._refused(path.parent, error) from error
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise self._odd(path)
        try:
            if flags & os.O_RDWR:
                self._tighten(path, mode, 0o600)
        except StoreError:
            os.close(fd)
            raise
        return fd

    def is_regular(self, path: Path) -> bool:
        """Whether the file exists. It is not opened.

        (Closing a descriptor of an SQLite file would drop the locks this process has on it.)

        Raises:
            StoreError: It is something else than a regular file.
        """
        return self._mode(path) is not None

    def make_private(self, path: Path) -> bool:
        """Whether the file exists; its mode is 0600 then. It is not opened.

        Raises:
            StoreError: It is something else than a regular file, or cannot be made private.
        """
        mode = self._mode(path)
        if mode is not None:
            self._tighten(path, mode, 0o600)
        return mode is not None

    def _mode(self, path: Path) -> int | None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused(path.parent, error) from error
        if not stat.S_ISREG(mode):
            raise self._odd(path)
        return mode

    def _tighten(self, path: Path, found: int, mode: int) -> None:
        if not found & _OTHERS:
            return
        try:
            path.chmod(mode)
        except OSError as error:
            raise StoreError(
                f"cannot use {self.kind}: {path} is open to other users and cannot be made "
                f"private: {error.strerror}. {self._elsewhere()} of your own."
            ) from error

    def _odd(self, path: Path) -> StoreError:
        kind = "a symbolic link" if path.is_symlink() else "not a regular file"
        return StoreError(
            f"cannot use {self.kind} {path.parent}: {path.name} is {kind}. Remove it, or set "
            f"{self.setting} to another directory."
        )

    def _refused(self, directory: Path, error: OSError) -> StoreError:
        return StoreError(
            f"cannot use {self.kind} {directory}: {error.strerror}. "
            f"{self._elsewhere()} you may write to."
        )

    def _elsewhere(self) -> str:
        return f"Set {self.setting} to a directory"
