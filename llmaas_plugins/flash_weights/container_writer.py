"""Write GGUF files of this plugin, in several runs if interrupted."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.files.file_bytes import as_store_error, sync_directory, write
from llmaas_plugins.files.partial_file import taken
from llmaas_plugins.flash_weights.container import MOST_HEADER_BYTES, ContainerHeader
from llmaas_plugins.flash_weights.container_file import read_start, sum_of

__all__ = ["Step", "write_container"]


class Step(NamedTuple):
    """Tensors that are made together.

    Attributes:
        names: Names of the tensors.
        make: Function that returns the tensors' contents in the order of ``names``.
        n_bytes: Progress to report after this step.
    """

    names: tuple[str, ...]
    make: Callable[[], Sequence[NDArray[Any]]]
    n_bytes: int


def write_container(path: Path, header: ContainerHeader, steps: Iterable[Step]) -> Iterator[int]:
    """Write a whole file, replacing an existing one; yield progress in bytes.

    Progress is twice the bytes of all steps: the file is read back after it was written.

    If writing stops early, the partial file stays beside the target, and the next run continues it.
    The header of the partial file has the checksums of the complete tensors.

    Raises:
        StoreError: The file cannot be written, or another process writes it.
    """
    if len(header.blank) > MOST_HEADER_BYTES:
        raise StoreError(f"cannot write {path}: {len(header.parts):,} tensors are too many.")
    partial = path.with_name(f"{path.name}.partial")
    what = f"cannot write {path}"
    then = f" The unfinished {partial} stays: the same command continues from there."
    place = f" It must be beside the model; {path.parent.absolute()} must be writable."
    with as_store_error(what, place), taken(partial) as fd, as_store_error(what, then):
        journal, done = _Journal(fd, header), list[tuple[tuple[str, ...], int]]()
        for step in steps:
            if not journal.has(step.names):
                journal.write(step.names, step.make())
            done.append((step.names, step.n_bytes))
            yield step.n_bytes
        journal.begin_check()
        for names, n_bytes in done:
            journal.check(names)
            yield n_bytes
        journal.finish()
        partial.replace(path)
        sync_directory(path.parent)


class _Journal:
    """Partial file, with a record of its complete tensors."""

    def __init__(self, fd: int, header: ContainerHeader) -> None:
        self._fd, self._header = fd, header
        self._sizes = {part.name: part.n_bytes for part in header.parts}
        sums = header.sums_in(read_start(fd, len(header.blank)))
        if sums is None:  # the partial file is of another model or other settings
            os.ftruncate(fd, 0)
            write(fd, header.blank, 0)
        self._sums = dict(zip(self._sizes, sums or [0] * len(self._sizes), strict=True))
        self._unchecked = set(self._sizes)

    def has(self, names: Iterable[str]) -> bool:
        """Return whether these tensors are in the file, and intact."""
        return all(self._sums[name] and self._found(name) == self._sums[name] for name in names)

    def write(self, names: Iterable[str], arrays: Iterable[NDArray[Any]]) -> None:
        for name, array in zip(names, arrays, strict=True):
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if content.size != self._sizes[name]:
                raise ValueError(f"{name} has {content.size} bytes, not {self._sizes[name]}")
            write(self._fd, content.data, self._header.places[name])
            self._sums[name] = crc32c(content)
        self._note()

    def begin_check(self) -> None:
        """Sync the file to disk, so that it is read from there."""
        os.ftruncate(self._fd, self._header.n_bytes)
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self, names: Iterable[str]) -> None:
        """Read tensors back."""
        for name in names:
            if self._found(name) != self._sums[name]:
                self._sums[name] = 0
                self._note()
                raise OSError(f"{name} read back differs from what was written")
            self._unchecked.remove(name)

    def finish(self) -> None:
        """Write the final header, when all tensors were read back."""
        if self._unchecked:
            raise ValueError(f"no step has written {', '.join(sorted(self._unchecked))}")
        write(self._fd, self._header.with_sums(self._sums.values()), 0)
        os.fsync(self._fd)

    def _found(self, name: str) -> int:
        return sum_of(self._fd, self._header.places[name], self._sizes[name])

    def _note(self) -> None:
        values = struct.pack(f"<{len(self._sums)}I", *self._sums.values())
        write(self._fd, values, self._header.sums_at)
