"""The full datastore on disk: every pair of every conversation, in append-only segment files.

One process writes at a time; other processes may read. Every read is verified, and bytes that
differ from what was written raise a ``StoreError`` that says where they are. An archive is not
safe for use by several threads at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from llmaas_hooks import StoreError
from llmaas_plugins.chats.exports import Message
from llmaas_plugins.files.store_lock import lock, unlock
from llmaas_plugins.knn_lm.archive.conversation_info import ConversationInfo, conversation_info
from llmaas_plugins.knn_lm.archive.erasure import erase_records
from llmaas_plugins.knn_lm.archive.files import (
    FILES,
    LOCK,
    SegmentName,
    erase,
    require_datastore,
    segment_files,
    write_atomic,
)
from llmaas_plugins.knn_lm.archive.pair_table import Columns, Origin, PairTable
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.archive.record import Record, encode_record
from llmaas_plugins.knn_lm.archive.segments import ArchiveSegment, Binding, StoredRecord

__all__ = ["Archive", "ErasedRecords"]

_log = logging.getLogger("llmaas.knn_lm")
_MOST_SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ErasedRecords:
    """Totals of one call of ``Archive.forget``.

    Attributes:
        n_conversations: Conversations that were removed.
        n_pairs: Pairs of these conversations.
        n_bytes: Bytes by which the files shrank.
    """

    n_conversations: int
    n_pairs: int
    n_bytes: int


class Archive:
    """An open archive; ``with Archive.open(...) as archive`` closes it.

    Pairs are numbered from 0 in the order of their conversations. Pair numbers change when a
    conversation is forgotten; conversation numbers never change.
    """

    def __init__(self, directory: Path, binding: Binding | None, *, writable: bool) -> None:
        """Open the archive; callers use ``open``."""
        self.directory = directory
        self._opened = contextlib.ExitStack()
        self._is_writable = writable
        self._binding = binding
        self._segments: list[tuple[SegmentName, ArchiveSegment]] = []
        self._places: dict[bytes, tuple[ArchiveSegment, StoredRecord]] = {}
        self._n_given = 0
        self._known_table: PairTable | None = None
        with contextlib.ExitStack() as opened, self._trouble("open"):
            if writable:
                FILES.directory(directory)
                opened.callback(unlock, lock(directory / LOCK, FILES))
            opened.callback(self._close_segments)
            self._open_segments()
            self._opened = opened.pop_all()

    @classmethod
    def open(
        cls, directory: Path, binding: Binding | None = None, *, writable: bool = False
    ) -> Self:
        """Open the archive in a directory.

        Args:
            directory: Directory of the datastore. It is created if needed when ``writable`` and
                ``binding`` are given.
            binding: Model that the archive must belong to; None to read or forget without a model.
            writable: Whether to allow adding and forgetting. If so, leftovers of a crash are
                erased.

        Raises:
            StoreError: The directory has no datastore, another process writes to it, it is for
                another model, or it is damaged.
        """
        directory = directory.expanduser()
        if binding is None or not writable:
            require_datastore(directory)
        return cls(directory, binding, writable=writable)

    def __enter__(self) -> Self:
        """Return the archive."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the archive."""
        self.close()

    def close(self) -> None:
        """Close the files and release the lock; idempotent."""
        self._is_writable = False
        self._opened.close()

    # -- reading ---------------------------------------------------------------------------------

    @property
    def binding(self) -> Binding | None:
        """Model of the archive; None if it is empty and was opened without a model."""
        return self._binding

    @property
    def n_pairs(self) -> int:
        """Number of pairs in the archive."""
        return len(self._table)

    @property
    def n_bytes(self) -> int:
        """Bytes of the segment files."""
        return sum(segment.n_bytes for _, segment in self._segments)

    def __contains__(self, id_: bytes) -> bool:
        """Return whether the archive holds the conversation with this id."""
        return id_ in self._places

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._places)

    def ids(self) -> list[bytes]:
        """Return the ids of the conversations, in order."""
        return list(self._places)

    def conversations(self) -> list[ConversationInfo]:
        """Describe the conversations, in order."""
        with self._trouble("read"):
            return [conversation_info(*place) for place in self._places.values()]

    def messages(self, id_: bytes) -> tuple[Message, ...]:
        """Return the messages of a conversation.

        Raises:
            KeyError: The conversation is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            return segment.meta(stored).conversation.messages

    def tokens(self, id_: bytes) -> npt.NDArray[np.int32]:
        """Return the tokens of a conversation.

        Raises:
            KeyError: The conversation is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            return segment.tokens(stored)

    def token_sequences(self) -> list[npt.NDArray[np.int32]]:
        """Return the tokens of every conversation, in order, reading nothing else."""
        return [self.tokens(id_) for id_ in self._places]

    def owner(self, id_: bytes) -> str | None:
        """Return the only app that may use a conversation, or None if all apps may.

        Raises:
            KeyError: The conversation is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            conversation = segment.meta(stored).conversation
        return None if conversation.is_shared else conversation.app

    def columns(self) -> Columns:
        """Return targets and probabilities of all pairs."""
        with self._trouble("read"):
            return self._table.columns()

    def origin(self, indices: npt.NDArray[np.integer]) -> Origin:
        """Return each pair's conversation number and the position of its target there."""
        with self._trouble("read"):
            return self._table.origin(indices)

    def pairs(self, indices: npt.NDArray[np.integer]) -> Pairs:
        """Return the pairs with these numbers, in this order, reading only their keys."""
        with self._trouble("read"):
            return self._table.pairs(indices)

    # -- writing ---------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """Add a conversation; it is on disk when this returns.

        Returns:
            The conversation's number.

        Raises:
            ValueError: The conversation is already in the archive, or its keys do not have the
                width that this model's keys have.
            StoreError: The conversation could not be written, and the archive does not contain it.
        """
        binding = self._writable_for()
        header, parts = encode_record(record, self._n_given)
        if header.id in self._places:
            raise ValueError(f"conversation {header.id.hex()} is already in the archive")
        if header.n_embd != binding.n_embd:
            raise ValueError(f"found keys of {header.n_embd} numbers, expected {binding.n_embd}")
        with self._trouble("write to"):
            segment = self._segment_for(header.n_bytes, binding)
            self._places[header.id] = segment, segment.append(header, parts)
        self._n_given = header.number + 1
        self._known_table = None
        return header.number

    def forget(self, ids: Collection[bytes]) -> ErasedRecords:
        """Remove conversations and erase their bytes; ids that are not in the archive are ignored.

        If the call fails, or the process ends during it, repeat the call: no other data is lost.

        Raises:
            StoreError: The disk failed.
        """
        if not self._is_writable:
            raise RuntimeError("the archive was opened only for reading")
        headers = [self._places[id_][1].header for id_ in set(ids) & self._places.keys()]
        before = self.n_bytes
        with self._trouble("forget in"):
            try:
                wanted = {header.id for header in headers}
                erase_records(self.directory, self._segments, wanted, self._n_given)
            finally:
                self._reopen_segments()
        n_pairs = sum(header.n_pairs for header in headers)
        return ErasedRecords(len(headers), n_pairs, before - self.n_bytes)

    # -- internals -------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        names, leftovers = segment_files(self.directory)
        for path in leftovers if self._is_writable else []:
            erase(path)
        for name in names:
            is_last = name == names[-1]
            path = self.directory / str(name)
            segment = ArchiveSegment(path, writable=self._is_writable, is_last=is_last)
            self._segments.append((name, segment))
            self._check_binding(segment)
            if segment.is_torn and self._is_writable:
                _log.warning(
                    "%s: the last conversation is incomplete and is dropped (%d bytes). "
                    "`llmaas datastore build` adds it again.", path, segment.n_bytes - segment.end,
                )  # fmt: skip
                segment.cut()
        self._count()

    def _reopen_segments(self) -> None:
        self._close_segments()
        try:
            self._open_segments()
        except BaseException:
            self.close()
            raise

    def _close_segments(self) -> None:
        while self._segments:
            self._segments.pop()[1].close()
        self._places = {}
        self._known_table = None

    def _count(self) -> None:
        places = [(segment, stored) for _, segment in self._segments for stored in segment.records]
        self._places = {stored.header.id: (segment, stored) for segment, stored in places}
        numbers = {stored.header.number for _, stored in places}
        if not len(numbers) == len(self._places) == len(places):
            raise StoreError(
                f"{FILES.kind} {self.directory} is damaged: it has {len(places)} records with "
                f"{len(self._places)} different ids and {len(numbers)} numbers. Remove the segment "
                "that was copied there."
            )
        given = [number + 1 for number in numbers] + [s.n_given for _, s in self._segments]
        self._n_given = max(given, default=0)
        self._known_table = None

    @property
    def _table(self) -> PairTable:
        if self._known_table is None:
            n_embd = self._binding.n_embd if self._binding else 0
            self._known_table = PairTable(list(self._places.values()), n_embd)
        return self._known_table

    def _writable_for(self) -> Binding:
        if not self._is_writable or self._binding is None:
            raise RuntimeError("the archive was opened only for reading, or without a model")
        return self._binding

    def _segment_for(self, n_bytes: int, binding: Binding) -> ArchiveSegment:
        """Return the last segment if it has room for a record, else a new segment."""
        if self._segments:
            name, segment = self._segments[-1]
            if not segment.records or segment.end + n_bytes <= _MOST_SEGMENT_BYTES:
                return segment
            name = SegmentName(name.number + 1, 0)
        else:
            name = SegmentName(0, 0)
        path = self.directory / str(name)
        write_atomic(path, [binding.pack(self._n_given)])
        segment = ArchiveSegment(path, writable=True, is_last=True)
        self._segments.append((name, segment))
        return segment

    def _check_binding(self, segment: ArchiveSegment) -> None:
        found = segment.binding
        if self._binding is None:
            self._binding = found
        if found != self._binding:
            raise StoreError(
                f"cannot use {FILES.kind} {self.directory}: {segment.path.name} is for "
                f"{_described(found)}, expected {_described(self._binding)}. Set {FILES.setting} "
                "to another directory for this model, or `llmaas datastore forget --all` and "
                "build it again."
            )

    @contextlib.contextmanager
    def _trouble(self, action: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot {action} {FILES.kind} {self.directory}: {error.strerror or error}. Fix "
                "that and try again; no stored data is lost."
            ) from error


def _described(binding: Binding) -> str:
    return f"model {binding.fingerprint.hex()[:12]}, keys {binding.key_kind} of {binding.n_embd}"
