"""Remembered gains: how well the datastore predicted tokens that need no evaluation any more.

Restored cells come without hidden states, so the datastore could not be judged on their tokens. A
gain (``trust``) is therefore kept under a name that depends on everything that it depends on: the
tokens up to the predicted one, the app, the settings, and the datastore with its model. Only the
last tokens of prompts and answers are kept, the oldest ones are dropped first, and a file holds
them across restarts. The gains of a deleted context are erased from it.

File, little-endian: magic, digest of the datastore (32 bytes), secret (32 bytes), number of
contexts' names and of gains (two u32), lengths of the names (u32 each), names (UTF-8), keys (16
bytes each), gains (f64 each), numbers of the names (i32 each, -1 for none), and a 32-byte digest of
all that. Another process may use the file, too: it is locked while it is read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_hooks import StoreError, Tokens, forks
from llmaas_plugins.files.file_bytes import as_store_error, write
from llmaas_plugins.files.store_lock import try_lock
from llmaas_plugins.knn_lm.archive.files import FILES, read
from llmaas_plugins.knn_lm.mixing.trust import LEAST_GAIN, MOST_GAIN

__all__ = ["ANY_OTHER", "Evidence", "Prefix"]

ANY_OTHER = -1
"""Stands for every next token that has no gain of its own."""
MOST_GAINS = 1 << 15

_MAGIC = b"LLKNEVD1"
_HEAD = struct.Struct("<8s32s32sII")
_KEY_BYTES, _DIGEST_BYTES = 16, 32
_MOST_FILE_BYTES = 1 << 24
_LOCK_S = 2.0
_STEP_S = 0.01

_log = logging.getLogger("llmaas.knn_lm")


class _Kept(NamedTuple):
    """A gain, and the persistent context whose request last used it."""

    gain: float
    context_id: str | None


_Gains = dict[bytes, _Kept]


class Prefix:
    """Growing text of one request, which names the gains of its tokens."""

    def __init__(self, root: bytes) -> None:
        """Start an empty text.

        Args:
            root: Hash of everything else that the gains depend on.
        """
        self._hash = hashlib.blake2b(root, digest_size=_KEY_BYTES)
        self._n = 0

    def upto(self, tokens: Tokens) -> bytes:
        """Return the name of a text that continues the one before."""
        self._hash.update(np.ascontiguousarray(tokens[self._n :], "<i4").tobytes())
        self._n = len(tokens)
        return self._hash.digest()


class Evidence:
    """Gains of one datastore, in memory and in a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Remember nothing; ``bind`` reads the file at ``path``."""
        self._path = path
        self._lock = forks.lock()
        self._pid = os.getpid()
        self._datastore = b""
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._gains: _Gains = {}
        self._new: set[bytes] = set()

    def __len__(self) -> int:
        """Return the number of gains in memory."""
        return len(self._gains)

    def bind(self, datastore: bytes) -> None:
        """Forget the gains of any other datastore, and read those of this one.

        Args:
            datastore: Digest of the datastore.
        """
        with self._lock:
            if datastore == self._datastore:
                return
            self._datastore, self._gains, self._new = datastore, {}, set()
            try:
                with self._file(os.O_RDWR) as fd:
                    found = None if fd is None else _parse(_content(fd))
            except StoreError as error:
                _log.warning("past judgments of the datastore are not read: %s", error)
                return
            if found is not None and found.datastore == datastore:
                self._secret, self._gains = found.secret, found.gains

    def root(self, *parts: object) -> bytes:
        """Return the hash of what all gains of a request depend on beside the tokens."""
        return hashlib.blake2b(repr(parts).encode(), key=self._secret).digest()

    def gain(self, prefix: bytes, token: int) -> float | None:
        """Return the gain of a token after a text; None if it is not known."""
        with self._lock:
            kept = self._gains.get(_key(prefix, token)) or self._gains.get(_key(prefix, ANY_OTHER))
        return None if kept is None else kept.gain

    def keep(self, prefix: bytes, gains: Mapping[int, float], context_id: str | None) -> None:
        """Remember gains of tokens after a text, for a request in a persistent context or none.

        The gain of ``ANY_OTHER`` comes first, so that it is dropped before those of the others.
        """
        with self._lock:
            for token, gain in gains.items():
                key = _key(prefix, token)
                self._gains.pop(key, None)
                self._gains[key] = _Kept(gain, context_id)
                self._new.add(key)
            while len(self._gains) > MOST_GAINS:
                oldest = next(iter(self._gains))
                del self._gains[oldest]
                self._new.discard(oldest)

    def save(self) -> None:
        """Add what is new in memory to the file.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._lock:
            if not self._new or self._pid != os.getpid():
                return
            with self._file(os.O_RDWR | os.O_CREAT) as fd:
                assert fd is not None
                _overwrite(fd, self._merged(_parse(_content(fd))).pack())
            self._new.clear()

    def forget(self, context_id: str) -> None:
        """Erase the gains of a context, also from the file.

        Raises:
            StoreError: They could not be erased from the file.
        """
        with self._lock:
            for key in [key for key, kept in self._gains.items() if kept.context_id == context_id]:
                del self._gains[key]
                self._new.discard(key)
            with self._file(os.O_RDWR) as fd:
                if fd is None:
                    return
                if (found := _parse(_content(fd))) is None:
                    _overwrite(fd, b"")  # a crash may have cut off its last writing
                    return
                left = {k: kept for k, kept in found.gains.items() if kept.context_id != context_id}
                if len(left) < len(found.gains):
                    _overwrite(fd, found._replace(gains=left).pack())

    # -- inside ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _file(self, flags: int) -> Iterator[int | None]:
        """Open and lock the file; None if it does not exist."""
        with as_store_error(f"cannot use {self._path}"):
            if not flags & os.O_CREAT and not FILES.is_regular(self._path):
                yield None
                return
            fd = FILES.open(self._path, flags)
            try:
                _wait_for_lock(fd, self._path)
                yield fd
            finally:
                os.close(fd)

    def _merged(self, found: _File | None) -> _File:
        """Return the file's gains with the new ones; only the latter if they do not fit together.

        Gains that are in memory but not new may have been erased from the file meanwhile.
        """
        new = {key: self._gains[key] for key in self._gains if key in self._new}
        before: _Gains = {}
        if found is not None and (found.datastore, found.secret) == (self._datastore, self._secret):
            before = {key: kept for key, kept in found.gains.items() if key not in new}
        last = list((before | new).items())[-MOST_GAINS:]
        return _File(self._datastore, self._secret, dict(last))


class _File(NamedTuple):
    """Contents of the file."""

    datastore: bytes
    secret: bytes
    gains: _Gains

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        names = list(dict.fromkeys(_names(self.gains.values())))
        numbers = {name: i for i, name in enumerate(names)}
        texts = [name.encode() for name in names]
        head = _HEAD.pack(_MAGIC, self.datastore, self.secret, len(names), len(self.gains))
        columns = (
            np.array([len(text) for text in texts], "<u4").tobytes(),
            *texts,
            *self.gains,
            np.array([kept.gain for kept in self.gains.values()], "<f8").tobytes(),
            np.array(
                [numbers.get(kept.context_id or "", -1) for kept in self.gains.values()], "<i4"
            ).tobytes(),
        )
        content = head + b"".join(columns)
        return content + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _names(kept: Iterable[_Kept]) -> Iterator[str]:
    return (one.context_id for one in kept if one.context_id)


def _parse(content: bytes) -> _File | None:
    """Return what a file holds; None if it is damaged, or was not written by this version."""
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(body) < _HEAD.size or not body.startswith(_MAGIC):
        return None
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    _, datastore, secret, n_names, n_gains = _HEAD.unpack_from(body)
    try:
        at = _HEAD.size
        lengths = np.frombuffer(body, "<u4", n_names, at).tolist()
        at += 4 * n_names
        names: list[str | None] = []
        for n_bytes in lengths:
            names.append(body[at : at + n_bytes].decode())
            at += n_bytes
        keys = [bytes(key) for key in np.frombuffer(body, f"V{_KEY_BYTES}", n_gains, at)]
        at += n_gains * _KEY_BYTES
        gains = np.frombuffer(body, "<f8", n_gains, at)
        numbers = np.frombuffer(body, "<i4", n_gains, at + 8 * n_gains)
        names.append(None)  # number -1
        kept = [_Kept(gain, names[i]) for gain, i in zip(gains.tolist(), numbers, strict=True)]
    except (ValueError, IndexError):
        return None
    if not (np.isnan(gains) | ((gains >= LEAST_GAIN) & (gains <= MOST_GAIN))).all():
        return None
    return _File(datastore, secret, dict(zip(keys, kept, strict=True)))


def _content(fd: int) -> bytes:
    return read(fd, min(os.fstat(fd).st_size, _MOST_FILE_BYTES), 0)


def _overwrite(fd: int, data: bytes) -> None:
    """Overwrite the file; a crash leaves a damaged one, which counts as empty."""
    n_before = os.fstat(fd).st_size
    write(fd, data + bytes(max(0, n_before - len(data))), 0)
    os.fsync(fd)
    os.ftruncate(fd, len(data))


def _wait_for_lock(fd: int, path: Path) -> None:
    """Wait until no other process reads or writes the file, which takes some milliseconds."""
    deadline = time.monotonic() + _LOCK_S
    while not try_lock(fd):
        if time.monotonic() > deadline:
            raise StoreError(f"{path} is in use by another process. Stop it, and try again.")
        time.sleep(_STEP_S)


def _key(prefix: bytes, token: int) -> bytes:
    data = prefix + struct.pack("<i", token)
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()
