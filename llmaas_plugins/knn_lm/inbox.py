"""Conversations that wait to be learnt: one file each, in the datastore's ``inbox``.

Anybody who may write there can put an export in; what has been learnt is erased.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.chats import Message
from llmaas_plugins.knn_lm.archive_files import FILES, INBOX, retire, write_whole

__all__ = ["REFUSED", "remember", "waiting"]

REFUSED = ".refused"
"""Added to the name of a file that is no export, and left for somebody to look at."""

_ENDINGS = (".json", ".jsonl")


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
    row = {
        "title": title or time.strftime("%Y-%m-%d %H:%M"),
        **({} if app is None else {"app": app}),
        "messages": [{"role": m.role, "content": m.content} for m in messages],
    }
    path = directory / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
    write_whole(path, [json.dumps(row, ensure_ascii=False).encode(errors="replace")])
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
    """Erase a file that has been learnt."""
    retire(path)
