"""One file of the archive: a header, then one record per conversation.

The header is a page: magic, format, numbers in a key, kind of key, conversations numbered so far
(uint32 each), the model's fingerprint (32 bytes), BLAKE2b-64 of these, zeros.

Records are only appended. Bytes that a crash left after the last complete record are a torn tail,
which the next writer drops. Any other difference from what was written is damage and is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from llmaas_hooks import StoreError
from llmaas_hooks.native import States
from llmaas_plugins._native import KNN_MAX_DIMS, crc32c, knn_sum
from llmaas_plugins.files.file_bytes import read_into, write
from llmaas_plugins.knn_lm.archive.files import FILES, read
from llmaas_plugins.knn_lm.archive.record import (
    COLUMNS,
    HEADER_BYTES,
    PAGE,
    RecordHeader,
    RecordMetadata,
    Unsound,
    decode_meta,
)

__all__ = ["ArchiveSegment", "Binding", "StoredRecord"]

_KINDS: tuple[States, ...] = get_args(States)
_MAGIC = b"LLMAASAR"
_FORMAT = 1
_LAYOUT = struct.Struct("<8s4I32s")
_DIGEST_BYTES = 8
_FINGERPRINT_BYTES = 32
_SUM_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Binding:
    """Model of an archive, and the kind of hidden states that are its keys.

    Attributes:
        fingerprint: Fingerprint of the model, 32 bytes.
        n_embd: Numbers in a key.
        key_kind: The last layer's feed-forward input, or the final norm's output.
    """

    fingerprint: bytes
    n_embd: int
    key_kind: States

    def __post_init__(self) -> None:
        """Refuse values that no model has.

        Raises:
            ValueError: A value is out of range.
        """
        if not 1 <= self.n_embd <= KNN_MAX_DIMS:
            raise ValueError(f"found keys of {self.n_embd} numbers, expected 1 to {KNN_MAX_DIMS}")
        if len(self.fingerprint) != _FINGERPRINT_BYTES or self.key_kind not in _KINDS:
            raise ValueError(f"expected {_FINGERPRINT_BYTES} bytes, and one of {_KINDS}")

    def pack(self, n_given: int) -> bytes:
        """Return the first page of a segment.

        Args:
            n_given: Conversation numbers given out so far, which later conversations must not get.
        """
        kind = _KINDS.index(self.key_kind)
        packed = _LAYOUT.pack(_MAGIC, _FORMAT, self.n_embd, kind, n_given, self.fingerprint)
        return (packed + _digest(packed)).ljust(PAGE, b"\0")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Offset of a record in its segment, and the record's header."""

    at: int
    header: RecordHeader

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.at + self.header.n_bytes


class ArchiveSegment:
    """An open segment, which the caller must close."""

    def __init__(self, path: Path, *, writable: bool, is_last: bool) -> None:
        """Open a segment and find its records; only the last record's body is verified.

        Raises:
            StoreError: The segment cannot be opened, or is damaged.
        """
        self.path = path
        self._fd = FILES.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.n_bytes = os.fstat(self._fd).st_size
            self.binding, self.n_given = self._read_header()
            self.records, self.is_torn = self._find_records(is_last=is_last)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def end(self) -> int:
        """Offset for the next record."""
        return self.records[-1].end if self.records else PAGE

    def cut(self) -> None:
        """Remove the torn tail."""
        os.ftruncate(self._fd, self.end)
        os.fsync(self._fd)
        self.n_bytes, self.is_torn = self.end, False

    def append(self, header: RecordHeader, parts: Sequence[tuple[int, bytes]]) -> StoredRecord:
        """Write a record; it is on disk when this returns."""
        at = self.end
        os.ftruncate(self._fd, at)  # remove what a failed append left
        for place, part in parts:
            write(self._fd, part, at + place)
        os.ftruncate(self._fd, at + header.n_bytes)
        os.fsync(self._fd)
        stored = StoredRecord(at, header)
        self.records.append(stored)
        self.n_bytes = stored.end
        return stored

    def raw(self, record: StoredRecord) -> bytes:
        """Return a record's bytes."""
        return read(self._fd, record.header.n_bytes, record.at)

    # -- reading ---------------------------------------------------------------------------------

    def meta(self, record: StoredRecord) -> RecordMetadata:
        """Return a record's metadata."""
        header = record.header
        data = self._part(record, "meta", HEADER_BYTES, header.n_meta, header.meta_sum)
        try:
            return decode_meta(data)
        except Unsound as error:
            raise self._damaged(record.at, str(error)) from error

    def tokens(self, record: StoredRecord) -> npt.NDArray[np.int32]:
        """Return a record's tokens."""
        header = record.header
        n_bytes = 4 * header.n_tokens
        data = self._part(record, "tokens", header.tokens_at, n_bytes, header.tokens_sum)
        return np.frombuffer(data, np.int32)

    def columns(self, record: StoredRecord) -> npt.NDArray[np.void]:
        """Return a record's pairs without their keys."""
        header = record.header
        n_bytes = COLUMNS.itemsize * header.n_pairs
        data = self._part(record, "columns", header.columns_at, n_bytes, header.columns_sum)
        columns = np.frombuffer(data, COLUMNS)
        positions = columns["position"]
        if len(columns) and not 0 <= positions.min() <= positions.max() < header.n_tokens:
            found = f"found positions {positions.min()} to {positions.max()}"
            raise self._damaged(record.at, f"{found}, expected 0 to {header.n_tokens - 1}")
        return columns

    def keys(
        self, record: StoredRecord, rows: npt.NDArray[np.int64], sums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float16]:
        """Return some of a record's keys, reading adjacent ones together.

        Args:
            record: The record.
            rows: Rows of the keys, ascending.
            sums: Checksums of these keys.
        """
        header = record.header
        keys = np.empty((len(rows), header.n_embd), np.float16)
        room, n_bytes = memoryview(keys.data).cast("B"), header.key_bytes
        places = (record.at + header.keys_at + rows * n_bytes).tolist()
        runs = _runs(rows)
        for (
            start,
            end,
        ) in runs:  # announce all reads first, so that the disk can serve them in parallel
            length = (end - start) * n_bytes
            os.posix_fadvise(self._fd, places[start], length, os.POSIX_FADV_WILLNEED)
        for start, end in runs:
            into = room[start * n_bytes : end * n_bytes]
            n_read = read_into(self._fd, into, places[start])
            if n_read != len(into):
                raise self._damaged(record.at, f"found {n_read} bytes, expected {len(into)}")
        found = knn_sum(keys)
        if not np.array_equal(found, sums):
            i = int(np.flatnonzero(found != sums)[0])
            what = f"found checksum {found[i]:08x} of the key of pair {rows[i]}"
            raise self._damaged(record.at, f"{what}, expected {sums[i]:08x}")
        return keys

    # -- internals -------------------------------------------------------------------------------

    def _read_header(self) -> tuple[Binding, int]:
        data = read(self._fd, PAGE, 0)
        packed = data[: _LAYOUT.size]
        digest = data[_LAYOUT.size : _LAYOUT.size + _DIGEST_BYTES]
        if len(data) < PAGE:
            raise self._damaged(0, f"found {len(data)} bytes, expected at least {PAGE}")
        if not packed.startswith(_MAGIC):
            raise self._damaged(0, f"found {packed[:8]!r}, expected {_MAGIC!r} at its beginning")
        if _digest(packed) != digest:
            found = _digest(packed).hex()
            raise self._damaged(0, f"found checksum {found}, expected {digest.hex()}")
        _, format_, n_embd, kind, n_given, fingerprint = _LAYOUT.unpack(packed)
        if format_ != _FORMAT:
            raise StoreError(
                f"cannot use {FILES.kind} {self.path.parent}: {self.path.name} has format "
                f"{format_}, expected {_FORMAT}. Use the release that made it, or set "
                f"{FILES.setting} to another directory."
            )
        try:
            return Binding(fingerprint, n_embd, _KINDS[kind]), n_given
        except (ValueError, IndexError) as error:
            raise self._damaged(0, str(error)) from error

    def _find_records(self, *, is_last: bool) -> tuple[list[StoredRecord], bool]:
        records: list[StoredRecord] = []
        at = PAGE
        while at < self.n_bytes:
            try:
                header = self._header_at(at)
                records.append(StoredRecord(at, header))
                at += header.n_bytes
            except Unsound as error:
                if is_last and not self._is_record_behind(at):
                    return records, True
                raise self._damaged(at, str(error)) from error
        if is_last and records:  # earlier records were on disk before the last one was begun
            try:
                self._verify(records[-1])
            except StoreError:
                del records[-1]
                return records, True
        return records, False

    def _header_at(self, at: int) -> RecordHeader:
        header = RecordHeader.unpack(read(self._fd, HEADER_BYTES, at), self.binding.n_embd)
        if header.n_bytes > self.n_bytes - at:
            left = self.n_bytes - at
            raise Unsound(f"found a length of {header.n_bytes}, expected at most {left}")
        return header

    def _is_record_behind(self, at: int) -> bool:
        for later in range(at + PAGE, self.n_bytes, PAGE):
            try:
                self._header_at(later)
            except Unsound:
                continue
            return True
        return False

    def _verify(self, record: StoredRecord) -> None:
        self.meta(record)
        self.tokens(record)
        sums = self.columns(record)["key_sum"]
        for first in range(0, len(sums), _SUM_ROWS):
            part = sums[first : first + _SUM_ROWS]
            self.keys(record, np.arange(first, first + len(part)), part)

    def _part(
        self, record: StoredRecord, name: str, place: int, n_bytes: int, expected: int
    ) -> bytes:
        data = read(self._fd, n_bytes, record.at + place)
        found = crc32c(data)
        if len(data) != n_bytes or found != expected:
            reason = f"found checksum {found:08x} of its {name}, expected {expected:08x}"
            raise self._damaged(record.at, reason)
        return data

    def _damaged(self, at: int, reason: str) -> StoreError:
        place = f"the record at byte {at}" if at else "its header"
        if os.fstat(self._fd).st_nlink == 0:
            return StoreError(
                f"another process has rewritten {self.path} meanwhile. Open the {FILES.kind} again."
            )
        return StoreError(
            f"{FILES.kind} {self.path.parent} is damaged: {self.path.name}, {place}: {reason}. "
            "Nothing was changed. Restore this file from a copy; or remove it, which loses its "
            "conversations, and run `llmaas datastore build` again."
        )


def _runs(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return start and end, in ``rows``, of each run of consecutive rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return list(itertools.pairwise([0, *breaks.tolist(), len(rows)]))


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()
