"""Remembered gains: how well the datastore predicted tokens that need no evaluation any more.

Restored cells come without hidden states, so the datastore could not be judged on their tokens. A
gain (``trust``) is therefore named by a hash of all that determines it: the tokens up to the
predicted one, the app, the settings, and the datastore with its model. Only the last tokens of
prompts and answers are kept, the oldest ones are dropped first, and a file holds them across
restarts (``evidence_file``). The gains of a deleted context are erased from it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from llmaas_hooks import StoreError, Tokens, forks
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.knn_lm.mixing.evidence_file import (
    KEY_BYTES,
    MOST_GAINS,
    SECRET_BYTES,
    EvidenceFile,
    Gains,
    Kept,
    Stored,
)

__all__ = ["ANY_OTHER", "Evidence", "Prefix"]

ANY_OTHER = -1
"""Token number for all next tokens without a gain of their own."""
_PAUSE = 30
"""Time without another attempt to read the file, relative to that of one that failed: requests wait
for it, and another process may hold the file for ever."""

_log = logging.getLogger("llmaas.knn_lm")


class Prefix:
    """Growing text of one request, which names the gains of its tokens."""

    def __init__(self, root: bytes) -> None:
        """Start an empty text.

        Args:
            root: Hash of everything else that the gains depend on.
        """
        self._hash = hashlib.blake2b(root, digest_size=KEY_BYTES)
        self._n = 0

    def upto(self, tokens: Tokens) -> bytes:
        """Return the name of a text that continues the one before."""
        self._hash.update(np.ascontiguousarray(tokens[self._n :], "<i4").tobytes())
        self._n = len(tokens)
        return self._hash.digest()


class Evidence:
    """Gains of one datastore, in memory and in a file. Thread-safe."""

    def __init__(self, path: Path, changed: Callable[[], None] = lambda: None) -> None:
        """Remember nothing yet.

        Args:
            path: Path of the file, which ``bind`` reads.
            changed: Function that is called when there is something new to be saved.
        """
        self._path, self._changed = path, changed
        self._file_lock = forks.lock()  # taken first, and held while the file is in use
        self._lock = forks.lock()  # held for microseconds
        self._pid = os.getpid()
        self._reads_from = 0.0  # after a failure
        self._reading = FailureLog(_log, logging.WARNING)
        self._datastore = b""
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._gains: Gains = {}
        self._new: dict[bytes, None] = {}  # the last used one last

    def __len__(self) -> int:
        """Return the number of gains in memory."""
        return len(self._gains)

    def bind(self, datastore: bytes) -> bool:
        """Forget the gains of any other datastore, and read those of this one.

        Args:
            datastore: Digest of the datastore.

        Returns:
            False if the file cannot be read now. Nothing is kept then, and a later call tries
            again: the file's gains have names that depend on a secret in it.
        """
        if datastore == self._datastore:
            return True
        with self._file_lock:
            if datastore == self._datastore:
                return True
            if (began := time.monotonic()) < self._reads_from:
                return False
            with self._lock:
                self._datastore, self._gains, self._new = b"", {}, {}
            try:
                with EvidenceFile.locked(self._path) as file:
                    found = None if file is None else file.stored()
            except StoreError as error:
                self._reading.failed("past judgments of the datastore are not read: %s", error)
                now = time.monotonic()
                self._reads_from = now + _PAUSE * (now - began)
                return False
            self._reading.worked()
            with self._lock:
                if found is not None and found.datastore == datastore:
                    self._secret, self._gains = found.secret, found.gains
                self._datastore = datastore
            return True

    def root(self, *parts: object) -> bytes:
        """Return the hash of what all gains of a request depend on beside the tokens."""
        return hashlib.blake2b(repr(parts).encode(), key=self._secret).digest()

    def gain(self, prefix: bytes, token: int) -> float | None:
        """Return the gain of a token after a text; None if it is not known."""
        with self._lock:
            kept = self._gains.get(_key(prefix, token)) or self._gains.get(_key(prefix, ANY_OTHER))
        return None if kept is None else kept.gain

    def keep(
        self, datastore: bytes, prefix: bytes, gains: Mapping[int, float], context_id: str | None
    ) -> None:
        """Remember gains of tokens after a text, unless they are about another datastore by now.

        The gain of ``ANY_OTHER`` comes first, so that it is dropped before those of the others.

        Args:
            datastore: Digest of the datastore that predicted the tokens.
            prefix: Name of the text.
            gains: Gains by token.
            context_id: Persistent context of the request, or None.
        """
        with self._lock:
            if datastore != self._datastore:
                return
            for token, gain in gains.items():
                key = _key(prefix, token)
                self._gains[key] = Kept(gain, context_id).after(self._gains.pop(key, None))
                self._new.pop(key, None)
                self._new[key] = None
            while len(self._gains) > MOST_GAINS:
                oldest = next(iter(self._gains))
                del self._gains[oldest]
                self._new.pop(oldest, None)
        self._changed()

    def save(self, is_current: Callable[[bytes], bool]) -> None:
        """Add what is new in memory to the file, unless the datastore that it is about is gone.

        Args:
            is_current: Function that returns whether the datastore of this digest is still there.
                It is also called while the file is locked: ``forget`` commands erase the datastore
                first and this file afterwards.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._file_lock:
            with self._lock:
                new = {key: self._gains[key] for key in self._new}
            if not new or self._pid != os.getpid() or not is_current(self._datastore):
                return
            with EvidenceFile.locked(self._path, creates=True) as file:
                if file is not None and is_current(self._datastore):
                    file.store(self._merged(file.stored(), new))
            with self._lock:
                for key, kept in new.items():
                    if self._gains.get(key) is kept:  # it was not kept again meanwhile
                        self._new.pop(key, None)

    def forget(self, context_id: str) -> None:
        """Erase the gains of a context, also from the file.

        Raises:
            StoreError: They could not be erased from the file.
        """
        with self._file_lock:  # no gains are on their way from the file, or to it
            with self._lock:
                gains = self._gains
                for key in [key for key, kept in gains.items() if kept.context_id == context_id]:
                    del gains[key]
                    self._new.pop(key, None)
            with EvidenceFile.locked(self._path) as file:
                if file is not None:
                    file.forget(context_id)

    # -- inside ---------------------------------------------------------------------------------

    def _merged(self, found: Stored | None, new: Gains) -> Stored:
        """Return the file's gains with the new ones; only the latter if they do not fit together.

        Gains that are in memory but not new may have been erased from the file meanwhile.
        """
        before: Gains = {}
        if found is not None and (found.datastore, found.secret) == (self._datastore, self._secret):
            before = found.gains
        gains = {key: kept for key, kept in before.items() if key not in new}
        gains |= {key: kept.after(before.get(key)) for key, kept in new.items()}
        return Stored(self._datastore, self._secret, gains)


def _key(prefix: bytes, token: int) -> bytes:
    data = prefix + struct.pack("<i", token)
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
