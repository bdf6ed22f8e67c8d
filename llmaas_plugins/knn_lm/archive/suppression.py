"""List of forgotten conversations, so that one that comes back is not learned again unnoticed.

An entry is a keyed digest; the random key is stored in the same file. Nobody without the file can
test whether a conversation was forgotten. A reader of the file can, but only with the whole
conversation at hand: its app, title and messages.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.files import FILES, FORGOTTEN, read, retire, write_atomic

__all__ = ["SuppressionList"]

_MAGIC = b"LLKNFGT1"
_KEY_BYTES = 32
_DIGEST_BYTES = 16
_MOST_BYTES = 1 << 28


class SuppressionList:
    """Ids of forgotten conversations, as keyed digests; lock the datastore before changing it."""

    def __init__(self, directory: Path) -> None:
        """Read the list; it is empty if nothing was forgotten.

        Raises:
            StoreError: The list is damaged, or cannot be read.
        """
        self._path = directory / FORGOTTEN
        self._key, self._digests = b"", set[bytes]()
        try:
            if FILES.is_regular(self._path):
                self._key, self._digests = self._parse(self._content())
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror or error}") from error

    def __contains__(self, id_: bytes) -> bool:
        """Return whether a conversation was forgotten."""
        return bool(self._digests) and self._digest(id_) in self._digests

    def add(self, ids: Collection[bytes]) -> None:
        """Add conversations to the list; the change is on disk when this returns."""
        self._key = self._key or secrets.token_bytes(_KEY_BYTES)
        self._change(self._digests | {self._digest(id_) for id_ in ids})

    def discard(self, id_: bytes) -> None:
        """Remove a conversation from the list, because it is wanted again."""
        self._change(self._digests - {self._digest(id_)})

    def _change(self, digests: set[bytes]) -> None:
        if digests == self._digests:
            return
        try:
            if digests:
                write_atomic(self._path, [_MAGIC, self._key, *sorted(digests)])
            else:
                retire(self._path)
        except OSError as error:
            raise StoreError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._digests = digests

    def _digest(self, id_: bytes) -> bytes:
        return hashlib.blake2b(id_, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def _content(self) -> bytes:
        fd = FILES.open(self._path, os.O_RDONLY)
        try:
            return read(fd, min(os.fstat(fd).st_size, _MOST_BYTES), 0)
        finally:
            os.close(fd)

    def _parse(self, content: bytes) -> tuple[bytes, set[bytes]]:
        start = len(_MAGIC) + _KEY_BYTES
        is_whole = len(content) > start and (len(content) - start) % _DIGEST_BYTES == 0
        if not content.startswith(_MAGIC) or not is_whole:
            raise StoreError(
                f"{self._path}, the list of forgotten conversations, is damaged. Remove it; "
                "forgotten conversations that come again are then learned again."
            )
        places = range(start, len(content), _DIGEST_BYTES)
        return content[len(_MAGIC) : start], {content[i : i + _DIGEST_BYTES] for i in places}
