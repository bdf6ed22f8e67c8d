"""The files of a datastore's directory, and how segments come and go.

A segment is named by its number and its generation. Forgetting writes the next generation, and only
when that is whole erases the one before; so whatever a crash leaves, the latest generations are the
archive, and the rest are leftovers to be erased.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import StoreError
from llmaas_plugins.file_bytes import read_into, sync_directory, write
from llmaas_plugins.private_files import PrivateFiles

__all__ = [
    "FILES",
    "FORGOTTEN",
    "INBOX",
    "LOCK",
    "ONLINE",
    "SELECTED",
    "SegmentName",
    "erase",
    "read",
    "require_datastore",
    "retire",
    "segment_files",
    "write_whole",
]

LOCK = "lock"
SELECTED = "datastore.knn"
ONLINE = "online.npz"
INBOX = "inbox"
FORGOTTEN = "forgotten"

_SEGMENT = re.compile(r"(\d{6})\.(\d{1,9})\.segment")
_PARTIAL = ".partial"  # not written whole yet
_DROPPED = ".dropped"  # not erased whole yet
_BLOCK = 1 << 20


def _is_own(name: str) -> bool:
    stem = _stem(name)
    return (
        stem in (LOCK, SELECTED, ONLINE, INBOX, FORGOTTEN) or _SEGMENT.fullmatch(stem) is not None
    )


FILES = PrivateFiles("datastore", "plugins.knn_lm.store", _is_own)


class SegmentName(NamedTuple):
    """Which segment, and how often it was rewritten."""

    number: int
    generation: int

    def __str__(self) -> str:
        """Its file's name."""
        return f"{self.number:06d}.{self.generation}.segment"


def segment_files(directory: Path) -> tuple[list[SegmentName], list[Path]]:
    """The segments in order, and the leftovers of crashes."""
    names = [entry.name for entry in directory.iterdir()]
    found = {
        SegmentName(int(match[1]), int(match[2])): name
        for name in names
        if (match := _SEGMENT.fullmatch(name))
    }
    latest = {segment.number: segment for segment in sorted(found)}
    older = [name for segment, name in found.items() if latest[segment.number] != segment]
    cut_short = [name for name in names if name != _stem(name) and _SEGMENT.fullmatch(_stem(name))]
    return list(latest.values()), [directory / name for name in older + cut_short]


def require_datastore(directory: Path) -> None:
    """Refuse a directory without a datastore.

    Raises:
        StoreError: There is none.
    """
    try:
        own = any(os.path.lexists(directory / name) for name in (LOCK, SELECTED, INBOX))
        is_there = own or bool(segment_files(directory)[0])
    except FileNotFoundError:
        is_there = False
    except OSError as error:
        raise StoreError(f"cannot open {FILES.kind} {directory}: {error.strerror}.") from error
    if not is_there:
        raise StoreError(
            f"there is no {FILES.kind} in {directory}. Name its directory with --store, or in "
            f"{FILES.setting}; `llmaas datastore build` makes one."
        )


def write_whole(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a new file; under this name it appears whole or not at all."""
    partial = path.with_name(path.name + _PARTIAL)
    fd = FILES.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        at = 0
        for block in blocks:
            write(fd, block, at)
            at += len(block)
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.rename(path)
    sync_directory(path.parent)


def retire(path: Path) -> None:
    """Make a file a leftover, so that nobody takes it for a damaged one, and erase it."""
    if path.name == _stem(path.name):
        path = path.rename(path.with_name(path.name + _DROPPED))
        sync_directory(path.parent)
    erase(path)


def erase(path: Path) -> None:
    """Overwrite a file with zeros, on the disk, and only then remove its name."""
    fd = FILES.open(path, os.O_RDWR)
    try:
        n_bytes = os.fstat(fd).st_size
        for at in range(0, n_bytes, _BLOCK):
            write(fd, bytes(min(_BLOCK, n_bytes - at)), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()
    sync_directory(path.parent)


def read(fd: int, n_bytes: int, at: int) -> bytes:
    """Bytes of a file; fewer only where it ends. The caller knows that it is so long."""
    room = memoryview(bytearray(n_bytes))
    return bytes(room[: read_into(fd, room, at)])


def _stem(name: str) -> str:
    return name.removesuffix(_PARTIAL).removesuffix(_DROPPED)
