"""Identify a model by a digest over every byte of every file that was loaded.

Several threads hash pieces of a file, and the results are combined as a tree; this is about as fast
as a disk reads. A digest is cached by the file's state, in memory and on disk. A file whose state
changed since loading is never hashed in place of the loaded one. On tmpfs, where a file's state
does not tell that its content changed, nothing is cached and each load hashes the file.

Metadata below ``llmaas.elastic`` does not count: it holds the widths of a prepared file's levels,
which change nothing that the whole model computes. So a file that gets a better table of widths
stays the same model. Whether levels cut keys and values does count, because it decides what their
cells hold. The adapters of levels do not count either, which may follow the tensors; the
field ``CONTENT`` says where they begin. All other bytes count.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from llmaas_hooks import FileStamp, LlmaasError, ModelFile, StoreError
from llmaas_plugins.files import digest_cache
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, read_into
from llmaas_plugins.files.file_times import records_mapped_writes
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.model.gguf_header import GGUFHeader, field_names, header_of, read_header

__all__ = [
    "CONTENT",
    "UNCOUNTED",
    "Digest",
    "begin_digest",
    "begin_file_digest",
    "changed_in_place",
    "content_end",
    "file_digest",
    "files_now",
]

UNCOUNTED = "llmaas.elastic"
"""Field that does not count for the digest, nor do those whose names continue it with a dot."""

CONTENT = f"{UNCOUNTED}.content_bytes"
"""Field with the number of bytes behind the header that count: an array of one integer. It is
ignored if tensors would not count.
"""

_CUT = "cuts_keys_values"
"""Entry of the field ``UNCOUNTED``, which is a JSON object, that counts if it is true."""

_PIECE_BYTES = 4 << 20
_READ_BYTES = 256 << 10
"""Bytes of a piece in memory at a time, few because contexts may run under a memory budget."""
_N_FIELDS_AT = 16
"""Offset of a header's number of fields, after the magic, the version and the tensors' number."""
_MOST_THREADS = 4
_MOST_KNOWN = 64
_SETTLED_NS = 2_000_000_000
"""Least age at which a file's state identifies its content. With coarse clocks, two changes in
quick succession may have the same time.
"""
_SPLIT = re.compile(r"(.*-)00001-of-(\d{5})\.gguf", re.DOTALL)

_known: dict[tuple[ModelFile, ...], Digest] = {}
_begun: weakref.WeakValueDictionary[int, Digest] = weakref.WeakValueDictionary()
"""Digests by the address of a load's tuple of files, which the digest keeps alive."""


class Digest:
    """Digest that a background thread computes or has computed.

    Attributes:
        files: Files of the digest.
    """

    def __init__(self, files: Sequence[ModelFile]) -> None:
        """Start computing the digest of these files."""
        self.files = tuple(files)
        self._found: str | None = None
        self._problem: str | None = None
        self._read: list[int] = []
        self._thread = threading.Thread(target=self._run, name="llmaas-digest", daemon=True)
        with contextlib.suppress(RuntimeError):  # no new threads at exit; ``get`` computes it
            self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether the digest could not be computed."""
        return self._problem is not None

    @property
    def n_read(self) -> int:
        """Bytes that were read so far."""
        return sum(self._read)

    def get(self, seconds: float | None = None) -> str | None:
        """Return the digest in hexadecimal digits.

        Args:
            seconds: Most seconds to wait; None waits until the digest is computed.

        Returns:
            The digest, or None if it takes longer.

        Raises:
            StoreError: A file is unreadable, or was changed since it was loaded.
        """
        if self._found is None and self._problem is None and self._thread.ident is not None:
            self._thread.join(seconds)
        if self._found is None and self._problem is None and not self._thread.is_alive():
            self._run()  # a forked child lacks its parent's threads
        if self._problem is not None:
            raise StoreError(self._problem)
        return self._found

    def _run(self) -> None:
        try:
            roots = [_file_root(file, self._read) for file in self.files]
            found = roots[0] if len(roots) == 1 else _hash(b"llmaas-model", b"".join(roots))
            self._found = found.hex()
        except Exception as error:
            self._problem = str(error)


def begin_digest(files: Sequence[ModelFile]) -> Digest:
    """Return the digest of loaded files, which is computed in the background.

    A digest of files whose state identifies their content is computed once. For other files it is
    computed once per load, if the caller keeps the returned object.
    """
    key = tuple(files)
    found = _known.get(key) or _of_load(key)
    if found is None or found.has_failed:  # a new attempt may succeed
        found = _begun[id(key)] = Digest(key)
        if _are_settled(key):
            _known[key] = found
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread trims, too
                for oldest in list(itertools.islice(_known, max(0, len(_known) - _MOST_KNOWN))):
                    _known.pop(oldest, None)
    return found


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of the model file that a path names now, including all its splits.

    Raises:
        StoreError: A file cannot be read, or changes while it is read.
    """
    found = begin_file_digest(path).get()
    assert found is not None
    return found


def begin_file_digest(path: str | os.PathLike[str]) -> Digest:
    """Return the digest of ``file_digest``, which is computed in the background.

    Raises:
        StoreError: A file cannot be read.
    """
    files = files_now(path)
    for name in (name for name, stamp in files if stamp is None):
        with as_store_error(f"cannot read {name}"):
            if FileStamp.of(Path(name).stat()) is None:
                raise StoreError(f"cannot read {name}: it is not a regular file.")
    return begin_digest(files)


def files_now(path: str | os.PathLike[str]) -> tuple[ModelFile, ...]:
    """Return the files that opening a path reads now: all splits, if it is the first of them."""
    name = os.fspath(path)
    match = _SPLIT.fullmatch(name)
    names = [name]
    if match is not None and _n_splits(name) == int(match[2]) > 1:
        names = [f"{match[1]}{i:05}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]
    return tuple(ModelFile(each, FileStamp.at(each)) for each in names)


def content_end(header: GGUFHeader) -> int:
    """Return where the bytes of a file that count for its digest end."""
    n_bytes = header.whole_number(CONTENT)
    if n_bytes is None:
        return header.n_bytes
    end = header.data_at + n_bytes
    last = max((one.at + one.n_bytes for one in header.tensors.values()), default=header.data_at)
    return end if last <= end <= header.n_bytes else header.n_bytes


def changed_in_place(files: Sequence[ModelFile]) -> bool:
    """Return whether a loaded file was written to since, so that even mapped weights changed.

    A deleted or replaced file stays unchanged for processes that have it open.
    """
    for path, was in files:
        now = FileStamp.at(path)
        if was is None or now is None or (now.device, now.inode) != (was.device, was.inode):
            continue
        if (now.n_bytes, now.mtime_ns) != (was.n_bytes, was.mtime_ns):
            return True
    return False


# -- inside --------------------------------------------------------------------------------------


def _of_load(files: tuple[ModelFile, ...]) -> Digest | None:
    found = _begun.get(id(files))
    return found if found is not None and found.files is files else None


def _n_splits(path: str) -> int:
    try:
        return read_header(Path(path)).whole_number("split.count") or 1
    except LlmaasError:
        return 1  # opening the file reports the problem better


def _are_settled(files: Sequence[ModelFile]) -> bool:
    now = time.time_ns()
    return all(
        stamp is not None
        and now - max(stamp.mtime_ns, stamp.ctime_ns) > _SETTLED_NS
        and records_mapped_writes(path)
        for path, stamp in files
    )


def _file_root(file: ModelFile, read: list[int]) -> bytes:
    """Return the digest of one file, and append the sizes of pieces that were read to ``read``.

    Raises:
        StoreError: The file was changed.
    """
    path, stamp = file
    if stamp is None:
        raise StoreError(
            f"cannot tell which model {path} is: it is not a readable regular file, or was "
            "replaced while it was loaded. Load it again."
        )
    is_settled = _are_settled([file])
    found = digest_cache.find(stamp) if is_settled else None
    if found is not None:
        return found
    with as_store_error(f"cannot tell which model {path} is"):
        found = _read_root(path, stamp, read)
    if is_settled:
        digest_cache.keep(stamp, found)
    return found


def _read_root(path: str, stamp: FileStamp, read: list[int]) -> bytes:
    fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    try:
        is_still = _is_still(os.fstat(fd), stamp)
        root = _root(fd, stamp.n_bytes, read) if is_still else None
        if root is None or not _is_still(os.fstat(fd), stamp):
            raise StoreError(
                f"cannot tell which model {path} is: the file was replaced or changed after it was "
                "loaded. Load it again."
            )
    finally:
        os.close(fd)
    return root


def _root(fd: int, n_bytes: int, read: list[int]) -> bytes | None:
    """Return the digest of an open file, or None if the file is shorter than it was."""
    prepared = _counted_header(fd)
    if prepared is None:
        leaves = _leaves(fd, n_bytes, read)
        return None if leaves is None else _tree(b"llmaas-file", n_bytes, leaves)
    head, start, end = prepared
    leaves = _leaves(fd, end, read, start)
    if leaves is None:
        return None
    return _tree(b"llmaas-prepared", end - start, [_hash(b"llmaas-header", head), *leaves])


def _counted_header(fd: int) -> tuple[bytes, int, int] | None:
    """Return the bytes of a header that count, and the start and end of the other bytes that do.

    Return None if all bytes of the file count.
    """
    found = header_of(fd) if any(map(_is_uncounted, field_names(fd))) else None
    if found is None:
        return None
    header, content = found
    fields = [
        content[first:last] for key, (first, last) in header.spans.items() if not _is_uncounted(key)
    ]
    infos, padding = content[header.infos_at : header.infos_end], content[header.infos_end :]
    count = len(fields).to_bytes(8, "little")
    parts = [content[:_N_FIELDS_AT], count, *fields, infos, padding.rstrip(b"\0")]
    if _cuts_cells(header):
        parts.append(_CUT.encode())
    return b"".join(parts), header.data_at, content_end(header)


def _cuts_cells(header: GGUFHeader) -> bool:
    """Return whether narrow levels of a prepared file leave parts of a context's cells empty."""
    try:
        about = parse_json(str(header.fields.get(UNCOUNTED)))
    except ValueError:  # another program's field, or a damaged one
        return False
    return isinstance(about, dict) and about.get(_CUT) is True


def _is_uncounted(key: str) -> bool:
    return key == UNCOUNTED or key.startswith(f"{UNCOUNTED}.")


def _tree(what: bytes, n_bytes: int, leaves: Sequence[bytes]) -> bytes:
    return _hash(what, n_bytes.to_bytes(8, "little") + b"".join(leaves))


def _is_still(status: os.stat_result, stamp: FileStamp) -> bool:
    now = FileStamp.of(status)
    if now is not None and status.st_nlink == 0:  # deleting changes ctime but no byte
        now = now._replace(ctime_ns=stamp.ctime_ns)
    return now == stamp


def _leaves(fd: int, n_bytes: int, read: list[int], start: int = 0) -> list[bytes] | None:
    """Return the digest of each piece of a file from ``start`` on.

    Return None if the file is shorter than it was.
    """
    n = -(-(n_bytes - start) // _PIECE_BYTES)
    leaves, numbers, failed = [b""] * n, itertools.count(), list[OSError | None]()

    def work() -> None:
        room = memoryview(bytearray(min(_READ_BYTES, n_bytes)))
        try:
            while not failed and (i := next(numbers)) < n:
                begin = start + i * _PIECE_BYTES
                end = min(begin + _PIECE_BYTES, n_bytes)
                leaf = _leaf(fd, begin, end, room)
                if leaf is None:
                    failed.append(None)
                else:
                    leaves[i] = leaf
                    read.append(end - begin)
        except OSError as error:
            failed.append(error)

    n_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), n)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_threads - 1)]
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    for error in failed:
        if error is not None:
            raise error
    return None if failed else leaves


def _leaf(fd: int, begin: int, end: int, room: memoryview) -> bytes | None:
    """Return the digest of a piece, read through ``room``, or None if the file ends within it."""
    digest = hashlib.blake2b(digest_size=digest_cache.DIGEST_BYTES, person=b"llmaas-piece")
    for at in range(begin, end, len(room)):
        part = room[: end - at]
        if read_into(fd, part, at) < len(part):
            return None
        digest.update(part)
    return digest.digest()


def _hash(what: bytes, content: bytes) -> bytes:
    size = digest_cache.DIGEST_BYTES
    return hashlib.blake2b(content, digest_size=size, person=what).digest()
