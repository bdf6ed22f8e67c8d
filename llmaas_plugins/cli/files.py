"""Files that commands read and write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.output import size_text
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.files.temporary_folder import folder_beside
from llmaas_plugins.machine import room

__all__ = ["TUNE_PREFIX", "check_room", "check_target", "content_of", "json_lines"]

_MOST_BYTES = 1 << 30
TUNE_PREFIX = ".llmaas-tune-"
"""Beginning of the names of the folders that `llmaas tune` makes beside stores, some with copies of
chats."""


def content_of(text: Path) -> bytes:
    """Return a text file's bytes.

    Raises:
        ConfigError: The file cannot be read, is longer than 1 GiB, or may have no end.
    """
    try:
        with open(text, "rb", opener=_opened) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # reading a device or a pipe may never end
                raise ConfigError(
                    f"cannot read {text}: it is a pipe or a device, expected a regular file. Write "
                    "its text to a file first."
                )
            if status.st_size > _MOST_BYTES:
                raise ConfigError(
                    f"cannot read {text}: it has {status.st_size} bytes, expected at most "
                    f"{_MOST_BYTES}. Give a part of it."
                )
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {text}: {error.strerror}.") from error


def json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each line of a JSONL file; blank lines are left out.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON.
    """
    for number, line in enumerate(content_of(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}. Each line must be JSON.") from error


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | OPEN_FLAGS)


def check_room(what: str, n_bytes: int, path: Path) -> None:
    """Check that a disk has room, before anything takes minutes.

    Args:
        what: Stage that writes.
        n_bytes: Bytes that it writes.
        path: Path at which it writes.

    Raises:
        ConfigError: There is less free space.
    """
    if n_bytes > (free := room(path).free_bytes):
        raise ConfigError(
            f"{what} writes up to {size_text(n_bytes)} to {path}, but {size_text(free)} are free "
            "there. Free space, or use another disk."
        )


def check_target(path: Path, option: str) -> None:
    """Check that a file can be written, before anything takes minutes.

    Args:
        path: Path of the file.
        option: Option with which the user can choose another path.

    Raises:
        ConfigError: The path is a folder or a device, or its folder does not exist.
        StoreError: The file cannot be written.
    """
    then = f" Choose another place with `{option} FILE`."
    with as_store_error(f"cannot write {path}", then):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is a folder or a device, expected a file's name.{then}")
        if not path.parent.is_dir():
            raise ConfigError(f"found no folder {path.parent} to write {path.name} to.{then}")
        with folder_beside(path, then):
            pass
