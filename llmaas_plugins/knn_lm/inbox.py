"""Conversations that wait to be learnt: one file each, in the datastore's ``inbox``.

Anybody who may write there can put an export in; what has been learnt is erased. A file that is
still being copied there stays until it is whole: nothing is erased that changed meanwhile.
"""

from __future__ import annotations

import json
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import ConfigError
from llmaas_plugins.chats import NO_APP, Conversation, Message, load_conversations
from llmaas_plugins.knn_lm.archive_files import FILES, INBOX, retire, write_whole

__all__ = ["REFUSED", "State", "done", "forget_waiting", "refuse", "remember", "waiting"]

REFUSED = ".refused"
"""Added to the name of a file that is no export, and left for somebody to look at."""

_ENDINGS = (".json", ".jsonl")
_COPYING_S = 5.0
"""Seconds without a change after which a file that cannot be read is no half of one."""


class State(NamedTuple):
    """The state of a file, by which a change is noticed."""

    inode: int
    n_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> State | None:
        """Return the state of ``path``; None if nothing is there."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)

    def is_settled(self) -> bool:
        """Return whether nobody has written to the file for a while."""
        return abs(time.time_ns() - self.mtime_ns) > _COPYING_S * 1e9


def remember(
    store: Path, messages: Sequence[Message], *, title: str = "", app: str | None = None
) -> Path:
    """Have a conversation with a cloud model learnt when the device is idle.

    Args:
        store: The datastore's directory, ``plugins.knn_lm.store``.
        messages: The conversation, in order.
        title: To know it by, in ``llmaas datastore inspect``.
        app: Whose it is: no other app is answered with it. None: every app may be.

    Returns:
        The file in which it waits; it survives a restart.

    Raises:
        ConfigError: There are no messages.
        StoreError: It cannot be written.
    """
    if not messages:
        raise ConfigError("a conversation without messages cannot be remembered")
    store = store.expanduser()
    FILES.directory(store)
    directory = store / INBOX
    directory.mkdir(mode=0o700, exist_ok=True)
    title = title or time.strftime("%Y-%m-%d %H:%M")
    one = Conversation(title, app or NO_APP, tuple(messages), is_shared=app is None)
    return _write(directory, [_row(one)])


def forget_waiting(store: Path, is_gone: Callable[[Conversation], bool]) -> int:
    """Erase conversations that wait to be learnt, also of files that hold others, too.

    Files that cannot be read stay: nobody knows what they hold, and nothing is learnt of them.

    Returns:
        How many went.
    """
    n_gone = 0
    for path in waiting(store):
        try:
            found = load_conversations(path)
        except ConfigError:
            continue
        kept = [one for one in found if not is_gone(one)]
        if len(kept) < len(found):
            if kept:
                _write(path.parent, [_row(one) for one in kept])
            done(path)
            n_gone += len(found) - len(kept)
    return n_gone


def _row(one: Conversation) -> dict[str, object]:
    messages = [{"role": m.role, "content": m.content} for m in one.messages]
    return {
        "title": one.title,
        **({} if one.is_shared else {"app": one.app}),
        "messages": messages,
    }


def _write(directory: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path = directory / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, [line.encode(errors="replace") for line in lines])
    return path


def waiting(store: Path) -> list[Path]:
    """What waits, oldest first."""
    try:
        return sorted(p for p in (store / INBOX).iterdir() if p.suffix in _ENDINGS)
    except FileNotFoundError:
        return []


def refuse(path: Path) -> Path:
    """Put a file aside that cannot be read."""
    return path.rename(path.with_name(path.name + REFUSED))


def done(path: Path) -> None:
    """Erase a file that has been learnt; of one that has another name, too, only this name."""
    found = path.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        retire(path)
    else:  # its bytes are somebody's own export
        path.unlink()
