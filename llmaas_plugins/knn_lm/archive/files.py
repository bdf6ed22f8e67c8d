"""The files of a datastore's directory, and how segments are written and erased.

A segment's name has its number and its generation. Forgetting writes the next generation and erases
the previous one only when the next one is complete. After a crash, the latest generations therefore
form the archive; all other segment files are leftovers to be erased.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import StoreError
from llmaas_plugins.files.file_bytes import read_into, sync_directory, write
from llmaas_plugins.files.private_files import PrivateFiles

__all__ = [
    "DROPPED",
    "EVIDENCE",
    "FILES",
    "FORGOTTEN",
    "INBOX",
    "LOCK",
    "ONLINE",
    "PARTIAL",
    "SELECTED",
    "SegmentName",
    "erase",
    "read",
    "require_datastore",
    "retire",
    "segment_files",
    "write_atomic",
]

LOCK = "lock"
SELECTED = "datastore.knn"
ONLINE = "online.npz"
INBOX = "inbox"
FORGOTTEN = "forgotten"
EVIDENCE = "evidence"

_SEGMENT = re.compile(r"(\d{6})\.(\d{1,9})\.segment")
PARTIAL = ".partial"  # suffix of a file that is still being written
DROPPED = ".dropped"  # suffix of a file that is still being erased
_BLOCK = 1 << 20


def _is_own(name: str) -> bool:
    stem = _stem(name)
    return (
        stem in (LOCK, SELECTED, ONLINE, INBOX, FORGOTTEN, EVIDENCE)
        or _SEGMENT.fullmatch(stem) is not None
    )


FILES = PrivateFiles("datastore", "plugins.knn_lm.store", _is_own)


class SegmentName(NamedTuple):
    """Number of a segment, and how many times the segment was rewritten."""

    number: int
    generation: int

    def __str__(self) -> str:
        """Return the name of the segment's file."""
        return f"{self.number:06d}.{self.generation}.segment"


def segment_files(directory: Path) -> tuple[list[SegmentName], list[Path]]:
    """Return the segments in order, and the leftovers of crashes."""
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
        StoreError: The directory has no datastore, or cannot be read.
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


def write_atomic(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a new file that appears under its name complete or not at all."""
    partial = path.with_name(path.name + PARTIAL)
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
    """Rename a file to a leftover, so that a crash cannot make it look damaged, and erase it."""
    if path.name == _stem(path.name):
        path = path.rename(path.with_name(path.name + DROPPED))
        sync_directory(path.parent)
    erase(path)


def erase(path: Path) -> None:
    """Overwrite a file with zeros on disk, then remove its name."""
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
    """Read bytes of a file; fewer if it ends first. The caller has checked that ``n_bytes`` fit."""
    room = memoryview(bytearray(n_bytes))
    return bytes(room[: read_into(fd, room, at)])


def _stem(name: str) -> str:
    return name.removesuffix(PARTIAL).removesuffix(DROPPED)
