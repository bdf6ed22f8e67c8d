"""Open private files of a store, which must be regular files; links are not followed."""

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
    """Rules for opening the files of one kind of store.

    Attributes:
        kind: Name of such a store in messages.
        setting: Setting that names the store's directory.
        is_own: Function that returns whether a file of this name can belong to the store.
    """

    kind: str
    setting: str
    is_own: Callable[[str], bool]

    def directory(self, directory: Path) -> None:
        """Create ``directory``, or make an existing one private (mode 0700).

        A directory that also holds other files keeps its mode, because they may be meant for
        others.

        Raises:
            StoreError: The directory cannot be created or made private, or others may replace files
                in it.
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
                f"(mode {mode:04o}), and it also holds other files. {self._elsewhere()} of its own."
            )

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor of a regular file; refuse links, pipes and directories.

        The file's mode becomes 0600, unless it is opened only for reading.

        Raises:
            StoreError: The path is no regular file, or cannot be opened or made private.
        """
        try:  # without O_NONBLOCK, a pipe would wait for its other end
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
        """Return whether the file exists, without opening it.

        Opening is avoided because closing a descriptor of an SQLite file would drop this process's
        locks on it.

        Raises:
            StoreError: The path is no regular file.
        """
        return self._mode(path) is not None

    def make_private(self, path: Path) -> bool:
        """Set an existing file's mode to 0600 without opening it; return whether it exists.

        Raises:
            StoreError: The path is no regular file, or cannot be made private.
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
