"""The full datastore on disk: every pair of every conversation, in append-only segment files.

One process writes at a time, others may look on. What is read is checked; what is not as it was
written is refused with a ``StoreError`` that says where. Not for several threads at once.
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
from llmaas_plugins.chats import Message
from llmaas_plugins.knn_lm.archive_files import (
    FILES,
    LOCK,
    SegmentName,
    erase,
    require_datastore,
    segment_files,
    write_whole,
)
from llmaas_plugins.knn_lm.archive_forget import forget_records
from llmaas_plugins.knn_lm.archive_pairs import Columns, Origin, PairTable
from llmaas_plugins.knn_lm.archive_record import Record, encode_record
from llmaas_plugins.knn_lm.pairs import Pairs
from llmaas_plugins.knn_lm.segments import Binding, Segment, Stored
from llmaas_plugins.store_lock import lock, unlock

__all__ = ["Archive", "ConversationInfo", "Forgotten"]

_log = logging.getLogger("llmaas.knn_lm")
_MOST_SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in the archive, without its texts.

    Attributes:
        number: Its number, which no other conversation of this archive ever has.
        id: Its id in hexadecimal digits, made from its app, title and messages.
        title: Its title.
        app: The app it belongs to.
        is_shared: Whether it belongs to none, and every app may be answered with it.
        source: Name of the file it came from.
        added: When, in seconds since 1970.
        n_messages: Messages in it.
        n_tokens: Tokens in it.
        n_pairs: Pairs made from it.
        n_bytes: Bytes it takes on disk.
    """

    number: int
    id: str
    title: str
    app: str
    is_shared: bool
    source: str
    added: float
    n_messages: int
    n_tokens: int
    n_pairs: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What went.

    Attributes:
        n_conversations: Conversations.
        n_pairs: Their pairs.
        n_bytes: Bytes of files.
    """

    n_conversations: int
    n_pairs: int
    n_bytes: int


class Archive:
    """An open archive; ``with Archive.open(...) as archive`` closes it.

    Pairs have numbers from 0 in the order of their conversations. They hold until a conversation is
    forgotten; a conversation's own number holds for ever.
    """

    def __init__(self, directory: Path, binding: Binding | None, *, writable: bool) -> None:
        """See ``open``."""
        self.directory = directory
        self._opened = contextlib.ExitStack()
        self._is_writable = writable
        self._binding = binding
        self._segments: list[tuple[SegmentName, Segment]] = []
        self._places: dict[bytes, tuple[Segment, Stored]] = {}
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
            directory: The datastore's. It is made if need be, to write with a binding.
            binding: Which model it must be for; None to look, or to forget, without a model.
            writable: Whether to add and forget. Leftovers of a crash are cleared away then.

        Raises:
            StoreError: There is none, another process writes to it, it is for another model, or it
                is damaged.
        """
        directory = directory.expanduser()
        if binding is None or not writable:
            require_datastore(directory)
        return cls(directory, binding, writable=writable)

    def __enter__(self) -> Self:
        """Go on."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the files and let go of the lock; idempotent."""
        self._is_writable = False
        self._opened.close()

    # -- looking ---------------------------------------------------------------------------------

    @property
    def binding(self) -> Binding | None:
        """Which model it is for; None while it holds nothing and was opened without a model."""
        return self._binding

    @property
    def n_pairs(self) -> int:
        """Pairs in it."""
        return len(self._table)

    @property
    def n_bytes(self) -> int:
        """Bytes of its files."""
        return sum(segment.n_bytes for _, segment in self._segments)

    def __contains__(self, id_: bytes) -> bool:
        """Whether a conversation is in it."""
        return id_ in self._places

    def __len__(self) -> int:
        """How many conversations are in it."""
        return len(self._places)

    def ids(self) -> list[bytes]:
        """Ids of the conversations, in order."""
        return list(self._places)

    def conversations(self) -> list[ConversationInfo]:
        """What is in it, in order."""
        with self._trouble("read"):
            return [_info(*place) for place in self._places.values()]

    def messages(self, id_: bytes) -> tuple[Message, ...]:
        """The texts of a conversation.

        Raises:
            KeyError: It is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            return segment.meta(stored).conversation.messages

    def tokens(self, id_: bytes) -> npt.NDArray[np.int32]:
        """The tokens of a conversation.

        Raises:
            KeyError: It is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            return segment.tokens(stored)

    def token_sequences(self) -> list[npt.NDArray[np.int32]]:
        """The tokens of every conversation, in order; nothing else is read for it."""
        return [self.tokens(id_) for id_ in self._places]

    def owner(self, id_: bytes) -> str | None:
        """Return the app that alone may be answered with a conversation; None: all may be.

        Raises:
            KeyError: It is not in the archive.
        """
        segment, stored = self._places[id_]
        with self._trouble("read"):
            conversation = segment.meta(stored).conversation
        return None if conversation.is_shared else conversation.app

    def columns(self) -> Columns:
        """Targets and probabilities of all pairs."""
        with self._trouble("read"):
            return self._table.columns()

    def origin(self, indices: npt.NDArray[np.integer]) -> Origin:
        """Which conversations pairs come from, and where there their targets are."""
        with self._trouble("read"):
            return self._table.origin(indices)

    def pairs(self, indices: npt.NDArray[np.integer]) -> Pairs:
        """Any pairs by number, in this order; only their keys are read."""
        with self._trouble("read"):
            return self._table.pairs(indices)

    # -- changing --------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """Add a conversation; when this returns it is on the disk, and counts.

        Returns:
            Its number.

        Raises:
            ValueError: It is in already, or its keys are not of this model's width.
            StoreError: It could not be written. It is not in then.
        """
        binding = self._writable_for()
        header, parts = encode_record(record, self._n_given)
        if header.id in self._places:
            raise ValueError(f"conversation {header.id.hex()} is in already")
        if header.n_embd != binding.n_embd:
            raise ValueError(f"found keys of {header.n_embd} numbers, expected {binding.n_embd}")
        with self._trouble("write to"):
            segment = self._segment_for(header.n_bytes, binding)
            self._places[header.id] = segment, segment.append(header, parts)
        self._n_given = header.number + 1
        self._known_table = None
        return header.number

    def forget(self, ids: Collection[bytes]) -> Forgotten:
        """Take conversations out and erase their bytes; ids that are not in it are passed over.

        If it fails or the process ends meanwhile, call it again: nothing else is lost.

        Raises:
            StoreError: The disk failed.
        """
        if not self._is_writable:
            raise RuntimeError("the archive was opened only to look")
        headers = [self._places[id_][1].header for id_ in set(ids) & self._places.keys()]
        before = self.n_bytes
        with self._trouble("forget in"):
            try:
                wanted = {header.id for header in headers}
                forget_records(self.directory, self._segments, wanted, self._n_given)
            finally:
                self._reopen_segments()
        n_pairs = sum(header.n_pairs for header in headers)
        return Forgotten(len(headers), n_pairs, before - self.n_bytes)

    # -- inside ----------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        names, leftovers = segment_files(self.directory)
        for path in leftovers if self._is_writable else []:
            erase(path)
        for name in names:
            is_last = name == names[-1]
            path = self.directory / str(name)
            segment = Segment(path, writable=self._is_writable, is_last=is_last)
            self._segments.append((name, segment))
            self._check_binding(segment)
            if segment.is_torn and self._is_writable:
                _log.warning(
                    "%s: the last conversation was not written whole and is dropped (%d bytes). "
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
            raise RuntimeError("the archive was opened only to look, or for no model")
        return self._binding

    def _segment_for(self, n_bytes: int, binding: Binding) -> Segment:
        """The last segment if a record has room in it, or else a new one."""
        if self._segments:
            name, segment = self._segments[-1]
            if not segment.records or segment.end + n_bytes <= _MOST_SEGMENT_BYTES:
                return segment
            name = SegmentName(name.number + 1, 0)
        else:
            name = SegmentName(0, 0)
        path = self.directory / str(name)
        write_whole(path, [binding.pack(self._n_given)])
        segment = Segment(path, writable=True, is_last=True)
        self._segments.append((name, segment))
        return segment

    def _check_binding(self, segment: Segment) -> None:
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
                f"cannot {action} {FILES.kind} {self.directory}: {error.strerror or error}. Try "
                "again when that is mended; nothing that was in it is lost."
            ) from error


def _info(segment: Segment, stored: Stored) -> ConversationInfo:
    meta, header = segment.meta(stored), stored.header
    conversation = meta.conversation
    return ConversationInfo(
        header.number, header.id.hex(), conversation.title, conversation.app,
        conversation.is_shared, meta.source, meta.added, len(conversation.messages),
        header.n_tokens, header.n_pairs, header.n_bytes,
    )  # fmt: skip


def _described(binding: Binding) -> str:
    return f"model {binding.fingerprint.hex()[:12]}, keys {binding.key_kind} of {binding.n_embd}"
