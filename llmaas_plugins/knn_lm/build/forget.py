"""Erasure of conversations from the archive, the selected datastore and the inbox."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.chats.exports import Conversation
from llmaas_plugins.files.store_lock import lock, unlock
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import (
    EVIDENCE,
    FILES,
    INBOX,
    LOCK,
    SELECTED,
    require_datastore,
    retire,
)
from llmaas_plugins.knn_lm.archive.record import conversation_id
from llmaas_plugins.knn_lm.archive.suppression import SuppressionList
from llmaas_plugins.knn_lm.build.inbox import forget_waiting
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import erase_leftovers
from llmaas_plugins.knn_lm.datastore.summary import read_summary
from llmaas_plugins.knn_lm.mixing.evidence_file import EvidenceFile

__all__ = ["ForgetResult", "forget_all", "forget_conversations"]


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """Totals of one call that forgets.

    Attributes:
        n_conversations: Conversations removed from the archive and from the inbox.
        n_pairs: Pairs removed from the archive.
        n_selected: Pairs removed from the selected datastore.
        freed_bytes: Bytes by which the files shrank.
        unread: Paths of files in the inbox that are no chats, so nobody knows what is in them. They
            stay.
    """

    n_conversations: int
    n_pairs: int
    n_selected: int
    freed_bytes: int
    unread: tuple[str, ...] = ()


def forget_conversations(
    archive: Archive,
    ids: Collection[bytes],
    is_waiting_gone: Callable[[Conversation], bool] = lambda _: False,
) -> ForgetResult:
    """Erase conversations from the archive, the selected datastore and the inbox.

    First the ids are added to the ``SuppressionList``. Selected pairs are erased before the
    archive's, so that an interrupted call can be repeated. Between both, the file is erased that
    tells how well the old pairs predicted: a process that is about to write it looks first whether
    those are still there.

    Args:
        archive: Archive that is open for writing.
        ids: Ids of the conversations; unknown ids are ignored.
        is_waiting_gone: Whether a conversation that waits to be learned is erased, too, whatever
            its id is.

    Raises:
        StoreError: The disk failed, or the selected datastore is damaged.
    """
    directory, n_selected = archive.directory, 0
    before = _n_bytes(directory)
    path = directory / SELECTED

    suppressed = SuppressionList(directory)
    waiting: set[bytes] = set()

    def is_gone(one: Conversation) -> bool:
        if is_waiting_gone(one) or conversation_id(one) in ids:
            waiting.add(conversation_id(one))
            return True
        return False

    try:
        suppressed.add(ids)
        n_waiting, unread = forget_waiting(directory, is_gone)
        suppressed.add(waiting)
        erase_leftovers(path)
    except OSError as error:
        raise _failed(directory, error) from error
    if os.path.lexists(path):
        n_selected = Datastore.without(path, [id_.hex() for id_ in ids])
    with EvidenceFile.locked(directory / EVIDENCE) as evidence:
        if evidence is not None:
            evidence.erase()
    erased = archive.forget(ids)
    freed = before - _n_bytes(directory)
    n_erased, left = erased.n_conversations + n_waiting, tuple(map(str, unread))
    return ForgetResult(n_erased, erased.n_pairs, n_selected, freed, left)


def forget_all(directory: Path) -> ForgetResult:
    """Erase everything in a datastore, including damaged files and the list of forgotten ids.

    Raises:
        StoreError: There is no datastore, another process writes to it, or the disk failed.
    """
    require_datastore(directory)
    fd = lock(directory / LOCK, FILES)
    try:
        with EvidenceFile.locked(directory / EVIDENCE):
            pass  # a killed process may have left a partial one
        before, counted = _n_bytes(directory), _count(directory)
        for path in _own_files(directory):
            is_shared = path.name == EVIDENCE  # whoever writes it has looked for the datastore
            with EvidenceFile.locked(path) if is_shared else contextlib.nullcontext():
                retire(path)
        return ForgetResult(*counted, before - _n_bytes(directory))
    except OSError as error:
        raise _failed(directory, error) from error
    finally:
        unlock(fd)


def _count(directory: Path) -> tuple[int, int, int]:
    """Count conversations, pairs and selected pairs, as far as the files are readable."""
    n_conversations = n_pairs = n_selected = 0
    with contextlib.suppress(StoreError), Archive.open(directory) as archive:
        n_conversations, n_pairs = len(archive), archive.n_pairs
    with contextlib.suppress(StoreError):
        selected = read_summary(directory)
        n_selected = selected.n_pairs if selected else 0
    return n_conversations, n_pairs, n_selected


def _own_files(directory: Path) -> list[Path]:
    """Return the datastore's files, leftovers first: retiring a file takes its leftover's name."""
    names = sorted((path.name for path in directory.iterdir()), key=len, reverse=True)
    own = [directory / name for name in names if FILES.is_own(name) and name not in (LOCK, INBOX)]
    inbox = directory / INBOX
    return own + sorted(inbox.iterdir() if inbox.is_dir() else ())


def _n_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in _own_files(directory))


def _failed(directory: Path, error: OSError) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return StoreError(
        f"cannot forget in {FILES.kind} {directory}: {error.strerror or error}. Fix that and "
        "forget again."
    )
