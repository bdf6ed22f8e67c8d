"""Keep results of long computations in a file, so that a stopped command continues after them.

A checkpoint names what it belongs to by a fingerprint. A file of another fingerprint, or a damaged
one, counts as missing: its results are computed again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from llmaas_plugins.files.array_file import read_arrays, write_arrays
from llmaas_plugins.files.file_bytes import as_store_error

__all__ = ["Checkpoint", "checkpoint_path", "fingerprint_of"]

_EVERY_S = 10.0
_VERSION = 1
_MOST_BYTES = 256 << 20
"""Most bytes of all results together."""


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
        write_arrays(self._path, _about(self._fingerprint), self._results)
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


def _about(fingerprint: str) -> dict[str, Any]:
    return {"version": _VERSION, "fingerprint": fingerprint}


def _read(path: Path, fingerprint: str) -> dict[str, NDArray[Any]]:
    """Return the results in a file; none if it is missing, damaged, or of another fingerprint."""
    try:
        about, results = read_arrays(path, _MOST_BYTES)
    except (ValueError, OSError):
        return {}
    return results if about == _about(fingerprint) else {}
