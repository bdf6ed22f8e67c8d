"""Keep results of long computations in a file, so that a stopped command continues after them.

A checkpoint names what it belongs to by a fingerprint. A file of another fingerprint, or a damaged
one, counts as missing: its results are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.files.file_bytes import as_store_error, sync_directory
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.files.partial_file import taken

__all__ = ["Checkpoint", "checkpoint_path", "fingerprint_of"]

_EVERY_S = 10.0
_VERSION = 1
_MOST_BYTES = 256 << 20
"""Largest file that is read, also unpacked."""
_ABOUT = "about"


def checkpoint_path(target: Path) -> Path:
    """Return the path of the checkpoint of a file that is being made."""
    return target.with_name(f"{target.name}.progress")


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """Return a hash of what decides results, given as JSON types."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Checkpoint:
    """Results by name, written to a file every ten seconds and when a ``with`` block ends early."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Read the results of an earlier run, if the file has this fingerprint."""
        self._path, self._fingerprint = path, fingerprint
        self._results = _read(path, fingerprint)
        self._is_saved, self._saved_at = True, time.monotonic()

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Delete the file after success; write it after an error or a signal."""
        if kind is None:
            self.remove()
        else:
            self.save()

    def __bool__(self) -> bool:
        """Return whether there are any results."""
        return bool(self._results)

    def get(self, name: str) -> NDArray[Any] | None:
        """Return a result, or None if it is not known."""
        return self._results.get(name)

    def keep(self, results: Mapping[str, NDArray[Any]]) -> None:
        """Replace results together; the file is written if the last time is long ago.

        Raises:
            StoreError: The file cannot be written.
        """
        self._results.update(results)
        self._is_saved = False
        if time.monotonic() - self._saved_at >= _EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file, replacing an earlier one, unless it has all results already.

        Raises:
            StoreError: The file cannot be written.
        """
        if self._is_saved:
            return
        partial = self._path.with_name(f"{self._path.name}.partial")
        about = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "sha256": _checksum(self._results),
        }
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        with as_store_error(f"cannot write {self._path}"), taken(partial) as fd:
            try:
                os.ftruncate(fd, 0)
                with os.fdopen(os.dup(fd), "wb") as file:
                    np.savez(file, allow_pickle=False, **{_ABOUT: text}, **self._results)
                os.fsync(fd)
                partial.replace(self._path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync_directory(self._path.parent)
        self._is_saved, self._saved_at = True, time.monotonic()

    def remove(self) -> None:
        """Delete the file and forget the results.

        Raises:
            StoreError: The file cannot be deleted.
        """
        self._results, self._is_saved = {}, True
        with as_store_error(f"cannot remove {self._path}"):
            self._path.unlink(missing_ok=True)


# -- inside --------------------------------------------------------------------------------------


def _read(path: Path, fingerprint: str) -> dict[str, NDArray[Any]]:
    """Return the results in a file; none if it is missing, damaged, or of another fingerprint."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > _MOST_BYTES:
                return {}
        with np.load(path, allow_pickle=False) as file:
            results = {name: file[name] for name in file.files}
        about = parse_json(results.pop(_ABOUT).tobytes())
        expected = {
            "version": _VERSION,
            "fingerprint": fingerprint,
            "sha256": _checksum(results),
        }
    except Exception:
        return {}
    return results if about == expected else {}


def _checksum(results: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(results.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
