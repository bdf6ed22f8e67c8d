"""Entries of a GGUF header: their formats, and functions that write them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARRAY",
    "ARRAY_KIND",
    "DTYPES",
    "KIND",
    "LENGTH",
    "STRING_KIND",
    "entry",
    "tensor_entry",
]

LENGTH = struct.Struct("<Q")
KIND = struct.Struct("<I")
ARRAY = struct.Struct("<IQ")
_UINT32_KIND, _FLOAT32_KIND, STRING_KIND, ARRAY_KIND = 4, 6, 8, 9
_FLOAT32 = struct.Struct("<f")
DTYPES: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Number types of metadata values, by GGUF's id."""


def entry(key: str, value: float | str | tuple[str, ...] | NDArray[Any]) -> bytes:
    """Return a field's entry in a header; a number is written with 32 bits."""
    name = _string(key)
    if isinstance(value, str):
        return name + KIND.pack(STRING_KIND) + _string(value)
    if isinstance(value, int):
        return name + KIND.pack(_UINT32_KIND) + KIND.pack(value)
    if isinstance(value, float):
        return name + KIND.pack(_FLOAT32_KIND) + _FLOAT32.pack(value)
    name += KIND.pack(ARRAY_KIND)
    if isinstance(value, tuple):
        return name + ARRAY.pack(STRING_KIND, len(value)) + b"".join(map(_string, value))
    (kind,) = (kind for kind, dtype in DTYPES.items() if dtype == value.dtype)
    return name + ARRAY.pack(kind, value.size) + value.tobytes()


def tensor_entry(name: str, type_: int, shape: Sequence[int], at: int) -> bytes:
    """Return a tensor's entry in a header.

    Args:
        name: Name of the tensor.
        type_: ``ggml_type`` of the tensor.
        shape: Shape in GGUF's order, columns first.
        at: Offset after the header.
    """
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + dims + ARRAY.pack(type_, at)


def _string(text: str) -> bytes:
    content = text.encode()
    return LENGTH.pack(len(content)) + content
