"""Find and read ``llmaas.toml``.

A file that was found, not named, must belong to this user or to root, and must not be writable by
every user. Otherwise another user could choose settings by leaving a file in a shared folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError

__all__ = ["chosen_file", "read_config_file"]

NAME = "llmaas.toml"
_MOST_BYTES = 1 << 20

_log = logging.getLogger("llmaas")


def chosen_file(environ: Mapping[str, str]) -> tuple[Path | None, bool]:
    """Choose the file for a caller that names none.

    ``LLMAAS_CONFIG`` names a file; if it is empty, no file is used. If it is unset, the file is
    ``llmaas.toml`` in the current folder, or else the user's own.

    Returns:
        The file, or None; and whether it was found rather than named.
    """
    named = environ.get("LLMAAS_CONFIG")
    if named is not None:
        return (Path(named) if named else None), False
    return next((path for path in _places(environ) if _is_there(path)), None), True


def read_config_file(path: Path, *, is_found: bool) -> dict[str, Any]:
    """Read a configuration file; log the name of a found file once.

    Args:
        path: Path of the file.
        is_found: Whether the file was found, not named.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or was found and is not trustworthy.
    """
    try:
        content = _content(path.expanduser(), is_found=is_found)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # unknown user in ~user, or NUL in the name
        raise ConfigError(f"cannot read configuration {path}: {error}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes, expected a {NAME}")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if is_found:
        _say(path)
    return values


# -- inside --------------------------------------------------------------------------------------


def _places(environ: Mapping[str, str]) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed
        yield Path.cwd() / NAME
    home = environ.get("HOME", "")
    folder = environ.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):  # the XDG specification ignores relative paths
        folder = f"{home}/.config" if home.startswith("/") else ""
    if folder:
        yield Path(folder) / "llmaas" / NAME


def _is_there(path: Path) -> bool:
    """Return whether anything exists at a path; reading it later reports what is wrong."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _content(path: Path, *, is_found: bool) -> bytes:
    # Opening a pipe without O_NONBLOCK would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if is_found else 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if is_found:
            _refuse_foreign(path, path.lstat(), os.fstat(file.fileno()))
        return file.read(_MOST_BYTES + 1)


def _refuse_foreign(path: Path, link: os.stat_result, file: os.stat_result) -> None:
    then = f"`--config {path}` or LLMAAS_CONFIG={path} uses it anyway."
    if not stat.S_ISREG(file.st_mode):
        raise ConfigError(f"{path} was found, but is not a regular file; rename or remove it.")
    owner = next((uid for uid in (link.st_uid, file.st_uid) if uid not in (os.geteuid(), 0)), None)
    if owner is not None:
        raise ConfigError(
            f"{path} was found, but belongs to user {owner}, expected {os.geteuid()}. {then}"
        )
    if file.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} was found, but every user can write it. `chmod o-w {path}`, or {then}"
        )


@functools.cache
def _say(path: Path) -> None:
    _log.warning("settings from %s", path)
