"""Read GGUF files of this plugin, and verify what is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import FileStamp, StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, read_into
from llmaas_plugins.flash_weights.container import MOST_HEADER_BYTES, ContainerHeader, parse_header

__all__ = [
    "Bytes",
    "ContainerFile",
    "Kind",
    "read_array",
    "read_start",
    "sum_of",
]

Bytes = NDArray[np.uint8]

_BLOCK = 16 << 20


class Kind(NamedTuple):
    """Kind of file.

    Attributes:
        name: Name in messages.
        architecture: Architecture in the header.
        version: Version of the format.
        command: Command that makes such a file.
    """

    name: str
    architecture: str
    version: int
    command: str


class ContainerFile:
    """Complete file, open for reading.

    Attributes:
        stamp: State of the file when it was opened.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        """Open the file, and check everything except the tensors' bytes.

        Raises:
            StoreError: The file cannot be opened, is of another kind, or is damaged.
        """
        self.path, self._kind = path, kind
        with as_store_error(f"cannot read {path}"):
            self._fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            self.header, self._sums = self._read_header()
        except BaseException:
            self.close()
            raise

    def damaged(self, why: object) -> StoreError:
        """Return the error to raise for this file."""
        return StoreError(
            f"{self.path} is not a {self._kind.name}, or is damaged: {why}. Make one with "
            f"`{self._kind.command}`."
        )

    def read(self, name: str) -> Bytes:
        """Return a tensor's bytes.

        Raises:
            StoreError: The bytes are damaged, or cannot be read.
        """
        (part,) = (part for part in self.header.parts if part.name == name)
        content = np.empty(part.n_bytes, np.uint8)
        with as_store_error(f"cannot read {self.path}"):
            n_read = read_array(self._fd, content, self.header.places[name])
        if n_read < part.n_bytes or crc32c(content) != self._sums[name]:
            raise self.damaged(f"its {name} differs from what was written")
        return content

    def check(self) -> Iterator[tuple[str, int, bool]]:
        """Yield each tensor's name, its number of bytes, and whether it is intact."""
        for part in self.header.parts:
            with as_store_error(f"cannot read {self.path}"):
                found = sum_of(self._fd, self.header.places[part.name], part.n_bytes)
            yield part.name, part.n_bytes, found == self._sums[part.name]

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _read_header(self) -> tuple[ContainerHeader, dict[str, int]]:
        with as_store_error(f"cannot read {self.path}"):
            stamp = FileStamp.of(os.fstat(self._fd))
            if stamp is None:
                raise self.damaged("it is not a regular file")
            self.stamp = stamp
            content = read_start(self._fd, min(stamp.n_bytes, MOST_HEADER_BYTES))
        try:
            header, sums = parse_header(content)
        except ValueError as error:
            raise self.damaged(error) from error
        if header.architecture != self._kind.architecture:
            raise self.damaged(f"its architecture is {header.architecture!r}")
        if header.fields.get("llmaas.format") != self._kind.version:
            raise self.damaged(
                f"it has format {header.fields.get('llmaas.format')}, expected {self._kind.version}"
            )
        if stamp.n_bytes != header.n_bytes:
            raise self.damaged(f"it has {stamp.n_bytes:,} bytes, expected {header.n_bytes:,}")
        return header, {part.name: s for part, s in zip(header.parts, sums, strict=True)}


def read_array(fd: int, into: Bytes, at: int) -> int:
    """Fill an array from a file; return the bytes read, fewer only where the file ends."""
    return read_into(fd, into.data, at)


def read_start(fd: int, n_bytes: int) -> bytes:
    """Return the first bytes of a file; fewer than ``n_bytes`` only if the file is shorter."""
    content = np.empty(n_bytes, np.uint8)
    return content[: read_array(fd, content, 0)].tobytes()


def sum_of(fd: int, at: int, n_bytes: int) -> int:
    """Return the checksum of a range of a file, cut at the file's end."""
    block, found = np.empty(min(n_bytes, _BLOCK), np.uint8), 0
    for done in range(0, n_bytes, _BLOCK):
        n_read = read_array(fd, block[: n_bytes - done], at + done)
        found = crc32c(block[:n_read], found)
    return found
