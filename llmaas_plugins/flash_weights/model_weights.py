"""Read a model's weights from its file, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from llmaas_hooks import FileStamp, StoreError
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error
from llmaas_plugins.flash_weights.container_file import Bytes, read_array
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["ModelWeights", "digest_of"]

_T = TypeVar("_T")


def digest_of(model: str | os.PathLike[str]) -> str:
    """Return the digest of a model file, over all its bytes.

    Raises:
        StoreError: The file cannot be read.
    """
    return file_digest(model)


class ModelWeights:
    """Model file, open for reading.

    Attributes:
        digest: Digest that identifies the model.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and locate its weights.

        Raises:
            ConfigError: The file is no GGUF file, or is damaged.
            StoreError: The file cannot be read.
        """
        self._path = path
        with as_store_error(f"cannot read {path}"):
            self._fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            self.digest = digest_of(path)
            self._tensors = read_header(path).tensors
            self._check()
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Bytes:
        """Return a weight's bytes.

        Raises:
            StoreError: The bytes cannot be read.
        """
        tensor = self._tensors[name]
        content = np.empty(tensor.n_bytes, np.uint8)
        with as_store_error(f"cannot read {name} of {self._path}"):
            n_read = read_array(self._fd, content, tensor.at)
            os.posix_fadvise(self._fd, tensor.at, tensor.n_bytes, os.POSIX_FADV_DONTNEED)
        if n_read < tensor.n_bytes:
            raise StoreError(f"cannot read {name} of {self._path}: the file ends within it.")
        return content

    def unchanged(self, steps: Iterable[_T]) -> Iterator[_T]:
        """Pass steps through, then check that the file did not change while they ran.

        Raises:
            StoreError: The file was changed meanwhile.
        """
        yield from steps
        self._check()
        if digest_of(self._path) != self.digest:
            raise StoreError(f"{self._path} was changed while it was read.")

    def _check(self) -> None:
        """Raise an error if the path names another file than the one that is open."""
        if FileStamp.at(self._path) != FileStamp.of(os.fstat(self._fd)):
            raise StoreError(f"{self._path} was replaced while it was read; try again.")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()
