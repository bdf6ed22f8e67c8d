"""Read safetensors files without trust: sizes are checked before anything is allocated."""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error
from llmaas_plugins.files.json_text import parse_json

__all__ = ["read_tensors"]

_LENGTH = struct.Struct("<Q")
_MOST_HEADER, _MOST_BYTES = 1 << 20, 256 << 20
_MOST_DIMENSIONS = 4


def read_tensors(path: Path) -> Mapping[str, NDArray[np.float32]]:
    """Return the float32 tensors of a safetensors file by name; others are left out.

    Raises:
        ConfigError: The file is no safetensors file, or is damaged or larger than 256 MiB.
        StoreError: The file cannot be read.
    """
    with (
        as_store_error(f"cannot read {path}"),
        os.fdopen(os.open(path, os.O_RDONLY | OPEN_FLAGS), "rb") as file,
    ):
        try:
            return _read(file)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} is no safetensors file, or is damaged: {error}. Install its package again."
            ) from error


# -- inside --------------------------------------------------------------------------------------


def _read(file: BinaryIO) -> dict[str, NDArray[np.float32]]:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise ValueError(f"expected a regular file of at most {_MOST_BYTES:,} bytes")
    start = file.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        raise ValueError("it ends before its header")
    (n_header,) = _LENGTH.unpack(start)
    room = status.st_size - _LENGTH.size - n_header
    if n_header > _MOST_HEADER or room < 0:
        raise ValueError(f"its header has {n_header:,} bytes")
    header = parse_json(file.read(n_header))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    places = {
        name: _place(name, entry, room) for name, entry in header.items() if name != "__metadata__"
    }
    if sum(end - begin for begin, end, _ in places.values()) > room:
        raise ValueError("its tensors overlap")
    found = {}
    for name, (begin, end, shape) in places.items():
        if header[name].get("dtype") == "F32":
            file.seek(_LENGTH.size + n_header + begin)
            found[name] = _floats(name, file.read(end - begin), shape)
    return found


def _place(name: str, entry: Any, room: int) -> tuple[int, int, tuple[int, ...]]:
    """Return the first byte of a tensor behind the header, the one after its last, and its shape.

    Raises:
        ValueError: The entry is impossible.
    """
    entry = entry if isinstance(entry, dict) else {}
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:80]!r} has no shape or no place")
    begin, end = offsets
    if not begin <= end <= room or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name[:80]!r} is outside of the file")
    if entry.get("dtype") == "F32" and end - begin != 4 * math.prod(shape):
        raise ValueError(f"{name[:80]!r} has {end - begin} bytes, which its shape does not need")
    return begin, end, tuple(shape)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _floats(name: str, content: bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if len(content) != 4 * math.prod(shape):
        raise ValueError("it ends early")
    values = np.frombuffer(content, "<f4").reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError(f"{name[:80]!r} has numbers that are not finite")
    return values
