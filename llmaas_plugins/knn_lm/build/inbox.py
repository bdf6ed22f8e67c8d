"""Conversations that wait to be learned, one file each, in the datastore's ``inbox``.

Anyone who may write to this directory can put a chat export there; files are erased once learned. A
file that is still being copied waits until it is complete, because its first lines alone might be a
valid export.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.chats.exports import NO_APP, Conversation, Message, load_conversations
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.store_lock import folder_lock
from llmaas_plugins.knn_lm.archive.files import (
    DROPPED,
    FILES,
    INBOX,
    PARTIAL,
    erase,
    retire,
    write_atomic,
)

__all__ = [
    "REFUSED",
    "FileState",
    "erase_learned",
    "forget_waiting",
    "is_complete",
    "refuse",
    "remember",
    "waiting_files",
]

REFUSED = ".refused"
"""Suffix for a file that is not a chat export; the file is left for the user to inspect."""

_NAME_BYTES = 255
"""Most bytes of a file's name."""

_ENDINGS = (".json", ".jsonl")
_OWN = re.compile(r"\d{20}-[0-9a-f]{8}\.jsonl")
_MOST_FILES, _MOST_BYTES = 4096, 64 << 20
"""Most remembered conversations that wait, and most bytes of them together, unless one has more.

Nothing is learned from them while `learn` is off, so they would fill the disk.
"""
_COPYING_S = 5.0
"""Seconds without a change after which a file counts as complete unless it is open for writing."""
_STALLED_S = 3600.0
"""Seconds without a change after which a file counts as complete even if it seems to be open.

Some file systems cannot tell whether a file is open.
"""


class FileState(NamedTuple):
    """State of a file, compared to detect changes."""

    inode: int
    n_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """Return the state of ``path``; None if nothing is there."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def remember(
    store: Path, messages: Sequence[Message], *, title: str = "", app: str | None = None
) -> Path:
    """Queue a conversation with a cloud model to be learned when the device is idle.

    At most 4,096 conversations of 64 MiB together wait. Then further ones are refused; what waits
    already stays, and so do files that others put there, which do not count.

    Args:
        store: Directory of the datastore, ``plugins.knn_lm.store``.
        messages: Messages of the conversation, in order.
        title: Title that ``llmaas datastore inspect`` shows.
        app: App that owns the conversation, so that no other app may use it; None lets all apps.

    Returns:
        The file in which the conversation waits; it survives a restart.

    Raises:
        ConfigError: There are no messages.
        StoreError: The file cannot be written, or too many conversations wait.
    """
    if not messages:
        raise ConfigError("a conversation without messages cannot be remembered")
    store = store.expanduser()
    FILES.directory(store)
    directory = store / INBOX
    with as_store_error(f"cannot use {directory}"):
        directory.mkdir(mode=0o700, exist_ok=True)
    _check_room(directory)
    title = title or time.strftime("%Y-%m-%d %H:%M")
    one = Conversation(title, app or NO_APP, tuple(messages), is_shared=app is None)
    return _write(directory, [_row(one)])


def forget_waiting(store: Path, is_gone: Callable[[Conversation], bool]) -> tuple[int, list[Path]]:
    """Erase waiting conversations, including those in files with others that stay.

    Call this while the datastore is locked. Leftovers of killed processes are erased first. Files
    that cannot be parsed stay: their contents are unknown, and nothing is learned from them.

    Returns:
        Number of conversations erased, and the files that cannot be parsed, also refused ones.

    Raises:
        StoreError: Another process is writing a file. The rest of it would be lost if it were
            erased, and learned if not.
    """
    for path in _leftovers(store / INBOX):
        erase_learned(path)
    n_gone, unread = 0, _refused_files(store)
    for path in waiting_files(store):
        before = FileState.of(path)
        _require_complete(path, before)
        try:
            found = load_conversations(path)
        except ConfigError:
            unread += [path] if os.path.lexists(path) else []
            continue
        kept = [one for one in found if not is_gone(one)]
        if len(kept) < len(found):
            _require_complete(path, before)
            if kept:
                _write(path.parent, [_row(one) for one in kept])
            erase_learned(path)
            n_gone += len(found) - len(kept)
    return n_gone, unread


def _require_complete(path: Path, before: FileState | None) -> None:
    if FileState.of(path) != before or _is_open_to_write(path):
        raise StoreError(
            f"{path} is being written by another process. Wait until it is complete, then forget "
            "again."
        )


def _check_room(directory: Path) -> None:
    own = [path for path in directory.iterdir() if _OWN.fullmatch(path.name)]
    sizes = [state.n_bytes for path in own if (state := FileState.of(path)) is not None]
    if len(sizes) >= _MOST_FILES or sum(sizes) >= _MOST_BYTES:
        raise StoreError(
            f"{len(sizes)} conversations of {sum(sizes) >> 20} MiB wait in {directory}, the "
            f"limit is {_MOST_FILES} of {_MOST_BYTES >> 20} MiB. Set learn = true in "
            "[plugins.knn_lm] to learn them, or remove them there."
        )


def _row(one: Conversation) -> dict[str, object]:
    messages = [{"role": m.role, "content": m.content} for m in one.messages]
    return {
        "title": one.title,
        **({} if one.is_shared else {"app": one.app}),
        "messages": messages,
    }


def _write(directory: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a file of the inbox; if that fails, as on a full disk, leave nothing of the texts.

    Raises:
        StoreError: The file cannot be written.
    """
    path = directory / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with as_store_error(f"cannot write to {directory}"), folder_lock(directory, fcntl.LOCK_SH):
        try:
            write_atomic(path, [line.encode(errors="replace") for line in lines])
        except BaseException:
            partial = path.with_name(path.name + PARTIAL)
            with contextlib.suppress(OSError):  # it has the new name already, or the disk fails
                erase(partial)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    return path


def _leftovers(directory: Path) -> list[Path]:
    """Return files that were not completely written or erased."""
    if not directory.is_dir():
        return []
    with folder_lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_alone:
        return [
            path
            for path in directory.iterdir()
            if (path.suffix == DROPPED and Path(path.stem).suffix in _ENDINGS)
            or (path.suffix == PARTIAL and _OWN.fullmatch(path.stem) and is_alone)
        ]


def waiting_files(store: Path) -> list[Path]:
    """Return the waiting files, oldest first."""
    try:
        return sorted(p for p in (store / INBOX).iterdir() if p.suffix in _ENDINGS)
    except FileNotFoundError:
        return []


def _refused_files(store: Path) -> list[Path]:
    try:
        return sorted(p for p in (store / INBOX).iterdir() if p.suffix == REFUSED)
    except FileNotFoundError:
        return []


def is_complete(path: Path) -> bool:
    """Return whether a file is complete, as far as can be told."""
    state = FileState.of(path)
    if state is None or _OWN.fullmatch(path.name):  # our files get their names when complete
        return state is not None
    quiet_s = abs(time.time_ns() - state.mtime_ns) / 1e9
    return quiet_s > _STALLED_S or (quiet_s > _COPYING_S and not _is_open_to_write(path))


def _is_open_to_write(path: Path) -> bool:
    """Return whether a process has a file open for writing.

    Linux grants a read lease on a file only if no process has the file open for writing.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:  # a process that opens the file now waits until we close it; SIGURG is ignored by default
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):  # the file has another owner, or the system is not Linux
        return False
    finally:
        os.close(fd)
    return False


def refuse(path: Path) -> Path:
    """Rename a file that cannot be parsed, so that it no longer waits, and return its new path.

    Earlier files of that name are kept. The new name is taken by creating something empty there,
    because renaming alone would replace what another process has put there meanwhile.
    """
    is_directory = stat.S_ISDIR(path.lstat().st_mode)
    for number in itertools.count(1):
        end = REFUSED if number == 1 else f".{number}{REFUSED}"
        name = os.fsencode(path.name)[: _NAME_BYTES - len(end)]  # a long name is cut
        place = path.with_name(os.fsdecode(name) + end)
        try:
            (place.mkdir if is_directory else place.touch)(exist_ok=False)
        except FileExistsError:
            continue
        return path.rename(place)
    raise AssertionError  # counting does not end


def erase_learned(path: Path) -> None:
    """Erase a file that has been learned; if it has other hard links, remove only this name."""
    found = path.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        retire(path)
    else:  # the bytes belong to a user's own file
        path.unlink()
