"""Cache of file digests on disk, one small file for each state of a file.

The state (device, inode, size, times of change) names the entry, so a changed file has no entry.
Entries are written atomically, need no lock, and are ignored when damaged.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import struct
import tempfile
from pathlib import Path

from llmaas_hooks import FileStamp, StoreError
from llmaas_plugins.files.private_files import PrivateFiles

__all__ = ["DIGEST_BYTES", "find", "keep"]

DIGEST_BYTES = 32

_CHECK_BYTES = 16
_VERSION = b"2"
"""Part of an entry's name that changes when a file's digest is computed in another way."""
_MOST_ENTRIES = 256
_PARTIAL = "partial-"
_FILES = PrivateFiles(
    "cache of digests",
    "XDG_CACHE_HOME",
    lambda name: bool(re.fullmatch(rf"[0-9a-f]{{32}}|{_PARTIAL}\w+", name)),
)
_log = logging.getLogger("llmaas")


def find(stamp: FileStamp) -> bytes | None:
    """Return the digest of the file that had this state, or None if it is not cached or damaged.

    Finding an entry makes it the most recently used one.
    """
    try:
        path = _directory() / _name(stamp)
        fd = _FILES.open(path, os.O_RDONLY)
    except StoreError:
        return None
    try:
        content = os.read(fd, DIGEST_BYTES + _CHECK_BYTES + 1)
        with contextlib.suppress(OSError):
            os.utime(path)
    except OSError:
        return None
    finally:
        os.close(fd)
    digest = content[:DIGEST_BYTES]
    return digest if content == digest + _check(stamp, digest) else None


def keep(stamp: FileStamp, digest: bytes) -> None:
    """Cache a digest; if that fails, later processes read the file again."""
    try:
        directory = _directory()
        _FILES.directory(directory)
        fd, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=directory)
        try:
            try:
                os.write(fd, digest + _check(stamp, digest))
            finally:
                os.close(fd)
            Path(partial).replace(directory / _name(stamp))
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        _trim(directory)
    except (OSError, StoreError) as error:
        _tell(str(error))


@functools.cache
def _tell(reason: str) -> None:
    """Log once why digests cannot be cached."""
    _log.warning("each start reads whole model files, because digests cannot be cached: %s", reason)


def _directory() -> Path:
    """Return the folder of the entries.

    Raises:
        StoreError: The user has no home folder, as in some containers.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError:
            raise StoreError("this user has no home folder; set XDG_CACHE_HOME or HOME") from None
    return base / "llmaas" / "digests"


def _name(stamp: FileStamp) -> str:
    return hashlib.blake2b(_packed(stamp), digest_size=16, person=_VERSION).hexdigest()


def _check(stamp: FileStamp, digest: bytes) -> bytes:
    return hashlib.blake2b(_packed(stamp) + digest, digest_size=_CHECK_BYTES).digest()


def _packed(stamp: FileStamp) -> bytes:
    return struct.pack("<QQQqq", *stamp)


def _trim(directory: Path) -> None:
    """Delete the least recently used entries, and partial files of killed processes."""
    found = []
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # another process trims concurrently
            found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    for _, path in sorted(found)[:-_MOST_ENTRIES]:
        Path(path).unlink(missing_ok=True)
