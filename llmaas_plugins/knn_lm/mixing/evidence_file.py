"""The file of remembered gains (``evidence``), which several processes may use.

It is overwritten in its place, so that no block of the disk keeps what was erased. The new content
is therefore written to a partial file first. If a process is killed meanwhile, one of both files is
whole, and the next process that locks the file finishes the work.

Little-endian: magic, digest of the datastore (32 bytes), secret (32 bytes), number of contexts'
names and of gains (two u32), lengths of the names (u32 each), names (UTF-8), keys (16 bytes each),
gains (f64 each), numbers of the names (i32 each, -1 for none), and a 32-byte digest of all that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import as_store_error, sync_directory, write
from llmaas_plugins.files.store_lock import try_lock
from llmaas_plugins.knn_lm.archive.files import FILES, PARTIAL, erase, read
from llmaas_plugins.knn_lm.mixing.trust import LEAST_GAIN, MOST_GAIN

__all__ = ["KEY_BYTES", "MOST_GAINS", "SECRET_BYTES", "EvidenceFile", "Gains", "Kept", "Stored"]

MOST_GAINS = 1 << 15
KEY_BYTES = 16
SECRET_BYTES = 32

_MAGIC = b"LLKNEVD1"
_HEAD = struct.Struct("<8s32s32sII")
_DIGEST_BYTES = 32
_GAIN_BYTES = KEY_BYTES + 8 + 4
_MOST_FILE_BYTES = 1 << 24
_LOCK_S = 2.0
_STEP_S = 0.01


class Kept(NamedTuple):
    """A gain, and the persistent context whose request last used it.

    Requests without a context leave a gain to the context that it has.
    """

    gain: float
    context_id: str | None

    def after(self, before: Kept | None) -> Kept:
        """Return what is kept if this use follows another one."""
        if self.context_id is not None or before is None:
            return self
        return self._replace(context_id=before.context_id)


Gains = dict[bytes, Kept]


class Stored(NamedTuple):
    """Contents of the file.

    Attributes:
        datastore: Digest of the datastore that the gains are about.
        secret: Key of the hashes that name the gains.
        gains: Gains by their names, the last used one last.
    """

    datastore: bytes
    secret: bytes
    gains: Gains

    def pack(self) -> bytes:
        """Return the bytes of a file with as many of the last gains as a file can hold."""
        gains = _last(self.gains)
        names = list(dict.fromkeys(_names(gains)))
        texts = [name.encode() for name in names]
        numbers: dict[str | None, int] = {name: i for i, name in enumerate(names)}
        numbers[None] = -1
        columns = (
            _HEAD.pack(_MAGIC, self.datastore, self.secret, len(names), len(gains)),
            np.array([len(text) for text in texts], "<u4").tobytes(),
            *texts,
            *gains,
            np.array([kept.gain for kept in gains.values()], "<f8").tobytes(),
            np.array([numbers[kept.context_id] for kept in gains.values()], "<i4").tobytes(),
        )
        content = b"".join(columns)
        return content + _digest(content)

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return what a file holds; None if it is damaged, or another version wrote it."""
        if not _is_whole(content):
            return None
        body = content[:-_DIGEST_BYTES]
        _, datastore, secret, n_names, n_gains = _HEAD.unpack_from(body)
        if n_gains > MOST_GAINS:
            return None
        try:
            at = _HEAD.size
            lengths = np.frombuffer(body, "<u4", n_names, at).tolist()
            at += 4 * n_names
            names: list[str | None] = []
            for n_bytes in lengths:
                names.append(body[at : at + n_bytes].decode())
                at += n_bytes
            keys = [bytes(key) for key in np.frombuffer(body, f"V{KEY_BYTES}", n_gains, at)]
            at += n_gains * KEY_BYTES
            gains = np.frombuffer(body, "<f8", n_gains, at)
            numbers = np.frombuffer(body, "<i4", n_gains, at + 8 * n_gains)
            names.append(None)  # number -1
            kept = [Kept(gain, names[i]) for gain, i in zip(gains.tolist(), numbers, strict=True)]
        except (ValueError, IndexError):
            return None
        if not (np.isnan(gains) | ((gains >= LEAST_GAIN) & (gains <= MOST_GAIN))).all():
            return None
        return cls(datastore, secret, dict(zip(keys, kept, strict=True)))


class EvidenceFile:
    """The file while it is open, and locked against other processes."""

    def __init__(self, fd: int, path: Path) -> None:
        """Use the descriptor of a locked file, and finish what a killed process had begun."""
        self._fd = fd
        self._partial = path.with_name(path.name + PARTIAL)
        self._settle()

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path, *, creates: bool = False) -> Iterator[Self | None]:
        """Open and lock the file inside the block; None if it does not exist.

        Args:
            path: Path of the file.
            creates: Whether to make the file if it does not exist.

        Raises:
            StoreError: The file cannot be used, or another process does not unlock it in time.
        """
        with as_store_error(f"cannot use {path}"):
            if not creates and not FILES.is_regular(path):
                yield None
                return
            fd = FILES.open(path, os.O_RDWR | (os.O_CREAT if creates else 0))
            try:
                _wait_for_lock(fd, path)
                yield cls(fd, path)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile keeps the descriptor
                os.close(fd)

    def stored(self) -> Stored | None:
        """Return what the file holds; None if it is damaged, or another version wrote it."""
        return Stored.parse(self._content())

    def store(self, stored: Stored) -> None:
        """Replace what the file holds; a kill at any time leaves the old content or the new one."""
        content = stored.pack()
        fd = FILES.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write(fd, content, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._partial.parent)
        self._overwrite(content)
        erase(self._partial)

    def erase(self) -> None:
        """Overwrite all that the file holds, and leave it empty."""
        self._overwrite(b"")

    def forget(self, context_id: str) -> None:
        """Erase the gains of a context, and all that a crash left of a file that it cut off."""
        content = self._content()
        if _is_whole(content) and context_id.encode() not in content:
            return  # without the time that it takes to read all gains
        if (found := Stored.parse(content)) is None:
            self.erase()
            return
        left = {key: kept for key, kept in found.gains.items() if kept.context_id != context_id}
        if len(left) < len(found.gains):
            self.store(found._replace(gains=left))

    def _settle(self) -> None:
        if not FILES.is_regular(self._partial):
            return
        fd = FILES.open(self._partial, os.O_RDONLY)
        try:
            content = _content(fd)
        finally:
            os.close(fd)
        if _is_whole(content):
            self._overwrite(content)
        erase(self._partial)

    def _content(self) -> bytes:
        return _content(self._fd)

    def _overwrite(self, data: bytes) -> None:
        """Overwrite the file; a crash leaves a damaged one, which counts as empty."""
        n_before = min(os.fstat(self._fd).st_size, _MOST_FILE_BYTES)  # longer ones are not ours
        write(self._fd, data + bytes(max(0, n_before - len(data))), 0)
        os.fsync(self._fd)
        os.ftruncate(self._fd, len(data))


def _content(fd: int) -> bytes:
    return read(fd, min(os.fstat(fd).st_size, _MOST_FILE_BYTES), 0)


def _last(gains: Gains) -> Gains:
    """Return the last gains that fit in a file."""
    room = _MOST_FILE_BYTES - _HEAD.size - _DIGEST_BYTES
    names: set[str | None] = {None}
    found: list[tuple[bytes, Kept]] = []
    for key, kept in reversed(gains.items()):
        room -= _GAIN_BYTES
        if kept.context_id is not None and kept.context_id not in names:
            names.add(kept.context_id)
            room -= 4 + len(kept.context_id.encode())
        if room < 0 or len(found) == MOST_GAINS:
            break
        found.append((key, kept))
    return dict(reversed(found))


def _names(gains: Gains) -> Iterator[str]:
    return (kept.context_id for kept in gains.values() if kept.context_id is not None)


def _is_whole(content: bytes) -> bool:
    """Return whether a file is of this version, and not damaged by accident."""
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return len(body) >= _HEAD.size and body.startswith(_MAGIC) and _digest(body) == digest


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _wait_for_lock(fd: int, path: Path) -> None:
    """Wait until no other process reads or writes the file, which takes some milliseconds."""
    deadline = time.monotonic() + _LOCK_S
    while not try_lock(fd):
        if time.monotonic() > deadline:
            raise StoreError(f"{path} is in use by another process. Stop it, and try again.")
        time.sleep(_STEP_S)
