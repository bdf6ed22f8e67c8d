"""Files of arrays with a checksum, which are replaced as a whole and read without trust."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.files.partial_file import replacing

__all__ = ["read_arrays", "write_arrays"]

Arrays = Mapping[str, NDArray[Any]]

_ABOUT = "about"
"""Name of the entry that says what the arrays are. No array may have it."""
_OVERHEAD_BYTES = 8192
"""Most bytes of an entry besides its array's: numpy's header, or all of ``about``."""


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Write arrays by name, replacing an existing file.

    Args:
        path: Path of the file.
        about: Description of the arrays; JSON types.
        arrays: The arrays.

    Raises:
        TypeError: An array has Python objects, which cannot be read again.
        StoreError: The file cannot be written.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"the array {name} has Python objects, expected numbers.")
    text = json.dumps({**about, "sha256": _checksum(arrays)}).encode()
    entries: dict[str, Any] = {_ABOUT: np.frombuffer(text, np.uint8), **arrays}
    with replacing(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        np.savez(file, **entries)  # before numpy 2.2, any keyword becomes an array


def read_arrays(path: Path, most_bytes: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what a file says about its arrays, and the arrays.

    Args:
        path: Path of the file.
        most_bytes: Most bytes of all arrays together. A file with more is not unpacked.

    Raises:
        ValueError: The file is too large, damaged, or of another kind.
        StoreError: The file cannot be read.
    """
    try:
        with as_store_error(f"cannot read {path}"), path.open("rb") as file:
            _check_size(file, most_bytes)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        about = parse_json(arrays.pop(_ABOUT).tobytes())
        is_whole = about.pop("sha256") == _checksum(arrays)
    except (ValueError, OSError):
        raise
    except Exception as error:  # zipfile, its decoders and numpy raise many types
        raise ValueError(str(error)) from error
    if not is_whole:
        raise ValueError("its checksum does not fit its content")
    return about, arrays


# -- inside --------------------------------------------------------------------------------------


def _check_size(file: Any, most_bytes: int) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    n_bytes = sum(entry.file_size for entry in entries)
    if n_bytes > most_bytes + len(entries) * _OVERHEAD_BYTES:
        raise ValueError(f"it holds {n_bytes} bytes, expected at most {most_bytes}")
    file.seek(0)


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
