"""The file of a selected datastore: a header, then arrays whose offsets follow from its counts.

Everything is verified before use, and the file's size before memory is allocated. Only the keys,
which stay in the file, are verified row by row when they are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.files.file_bytes import read_into
from llmaas_plugins.knn_lm.archive.files import DROPPED, FILES, PARTIAL, erase, read, write_atomic
from llmaas_plugins.knn_lm.datastore.layout import ArrayCounts, whole_pages

__all__ = [
    "Arrays",
    "DatastoreFile",
    "damaged",
    "erase_leftovers",
    "write_file",
]

Arrays = Mapping[str, NDArray[Any]]

_MAGIC = b"LLMAASKN"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIIQQ32s14I")  # then its own checksum
_PART = 1 << 24
_MOST = 1e15
"""Bound for all numbers: sums over dimensions of squared float16 values, at most 65,504 each."""
_LEAST = {
    "weights": float(np.finfo(np.float32).tiny),
    **dict.fromkeys(("steps", "scales", "norms", "front_norms"), 0.0),
}
_NEXT = "Make it again with `llmaas datastore select`"


class DatastoreHeader(NamedTuple):
    """Contents of the first page."""

    counts: ArrayCounts
    fingerprint: bytes
    sums: tuple[int, ...]


def damaged(path: Path, found: str, expected: str) -> StoreError:
    """Return the error for a file that differs from what was written."""
    return StoreError(f"cannot use datastore {path}: found {found}, expected {expected}. {_NEXT}.")


class DatastoreFile:
    """An open file whose header and size have been verified."""

    def __init__(self, path: Path) -> None:
        """Open a file and verify its header and size.

        Raises:
            StoreError: The file cannot be opened, is no datastore of this version, or is damaged.
        """
        self.path = path
        self.fd = FILES.open(path, os.O_RDONLY)
        try:
            with _as_store_error("read", path):
                self.counts, self.fingerprint, self._sums = _read_header(self.fd, path)
            self._places = self.counts.places()
            self._require_size()
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> bytes:
        """Digest of the header, which has the sums of all arrays: another content has another one.

        It has 32 bytes.
        """
        header = repr((self.counts, self.fingerprint, self._sums)).encode()
        return hashlib.blake2b(header, digest_size=32).digest()

    @property
    def keys_at(self) -> int:
        """Offset of the keys."""
        return self._places["keys"]

    def read(self, name: str, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read and verify an array.

        Raises:
            StoreError: The array cannot be read, or is damaged.
        """
        dtype, shape = self.counts.arrays()[name]
        array = np.empty(shape, dtype) if into is None else into
        self._read(name, array, self._places[name])
        if crc32c(array) != self._sums[list(self.counts.arrays()).index(name)]:
            raise damaged(self.path, f"damaged {name}", "those that were written")
        self._require_possible(name, array)
        return array

    def read_keys(self, first: int, n: int) -> NDArray[np.float16]:
        """Read rows of keys; the caller checks their sums."""
        keys = np.empty((n, self.counts.n_embd), np.float16)
        self._read("keys", keys, self.keys_at + 2 * first * self.counts.n_embd)
        return keys

    def _require_possible(self, name: str, array: NDArray[Any]) -> None:
        """Refuse impossible numbers: checksums find damage, but not a file made by someone else."""
        if array.dtype.kind != "f" or array.size == 0:
            return
        least = _LEAST.get(name, -_MOST)
        if not (array.min() >= least and array.max() <= _MOST):  # NaN fails both comparisons
            raise damaged(self.path, f"impossible {name}", f"{least:g} to {_MOST:g}")

    def _require_size(self) -> None:
        found, expected = os.fstat(self.fd).st_size, self._places["end"]
        if found != expected:
            raise damaged(self.path, f"{found:,} bytes", f"{expected:,}")

    def _read(self, name: str, array: NDArray[Any], at: int) -> None:
        room = array.reshape(-1).view(np.uint8).data
        with _as_store_error("read", self.path):
            if read_into(self.fd, room, at) < len(room):
                raise damaged(self.path, f"the end of the file in its {name}", "more bytes")

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def write_file(  # noqa: PLR0913 -- the parts of a file
    path: Path,
    fingerprint: bytes,
    counts: ArrayCounts,
    arrays: Arrays,
    keys: Iterable[NDArray[np.float16]],
    *,
    erases_old: bool = False,
) -> None:
    """Write a whole file; if anything fails, keep the existing one.

    Args:
        path: Path of the file.
        fingerprint: Fingerprint of the model, 32 bytes.
        counts: Sizes of the arrays.
        arrays: All arrays of ``counts.arrays()``.
        keys: All rows of keys, in any number of parts.
        erases_old: Whether to overwrite the old file with zeros afterwards. A process that has it
            open then finds damaged keys.

    Raises:
        StoreError: The file cannot be written.
    """
    with _as_store_error("write", path):
        erase_leftovers(path)
        try:
            if erases_old:
                os.link(path, _dropped(path))
            write_atomic(path, _blocks(fingerprint, counts, arrays, keys))
        finally:
            erase_leftovers(path)


def erase_leftovers(path: Path) -> None:
    """Erase the leftovers of a crash during writing or replacing a file."""
    dropped = _dropped(path)
    if path.exists() and dropped.exists() and dropped.samefile(path):
        dropped.unlink()  # the crash came before the new file replaced this one
    for leftover in (dropped, path.with_name(path.name + PARTIAL)):
        if os.path.lexists(leftover):
            erase(leftover)


def _dropped(path: Path) -> Path:
    return path.with_name(path.name + DROPPED)


def _read_header(fd: int, path: Path) -> DatastoreHeader:
    page = read(fd, _HEADER.size + 4, 0)
    if page[: len(_MAGIC)] != _MAGIC or len(page) < _HEADER.size + 4:
        raise damaged(path, "another kind of file", "a selected datastore")
    _, version, *numbers, fingerprint = (parts := _HEADER.unpack(page[: _HEADER.size]))[:9]
    if version != _VERSION:
        raise damaged(path, f"format {version}", f"format {_VERSION}")
    counts, sums = ArrayCounts(*numbers), parts[9:]
    if page[_HEADER.size :] != _sum_of(page[: _HEADER.size]):
        raise damaged(path, "a damaged header", "the one that was written")
    if not counts.are_possible():
        raise damaged(path, f"impossible counts ({counts})", "counts that fit together")
    return DatastoreHeader(counts, fingerprint, tuple(sums))


def _blocks(
    fingerprint: bytes, counts: ArrayCounts, arrays: Arrays, keys: Iterable[NDArray[np.float16]]
) -> Iterator[bytes]:
    ordered = [
        np.ascontiguousarray(arrays[name], kind) for name, (kind, _) in counts.arrays().items()
    ]
    sums = [crc32c(array) for array in ordered]
    header = _HEADER.pack(_MAGIC, _VERSION, *counts, fingerprint, *sums)
    yield _padded(header + _sum_of(header))
    for array in ordered:
        view = array.reshape(-1).view(np.uint8)
        for at in range(0, view.size, _PART):
            yield _padded(view[at : at + _PART].tobytes())
    for part in keys:
        yield part.tobytes()


@contextlib.contextmanager
def _as_store_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot {what} datastore {path}: {error.strerror}") from error


def _sum_of(header: bytes) -> bytes:
    return crc32c(header).to_bytes(4, "little")


def _padded(block: bytes) -> bytes:
    return block.ljust(whole_pages(len(block)), b"\0")
