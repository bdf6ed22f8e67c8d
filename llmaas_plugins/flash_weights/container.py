"""Format of this plugin's GGUF files: their header, and how it is parsed.

Each tensor starts at a multiple of 4 KiB, so reads need no copy. The metadata has a checksum of
each tensor, and one of the header itself. A file may come from anybody. A header is accepted only
if ``ContainerHeader`` reproduces it byte for byte from the parsed values.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llmaas_plugins._native import crc32c
from llmaas_plugins.lazy import lazy
from llmaas_plugins.model import gguf_header
from llmaas_plugins.model.gguf_entries import entry, tensor_entry
from llmaas_plugins.model.gguf_header import Value as FieldValue

__all__ = ["ALIGNMENT", "MOST_HEADER_BYTES", "ContainerHeader", "Part", "Value", "parse_header"]

ALIGNMENT = 4096
MOST_HEADER_BYTES = 4 << 20
"""Largest header: enough for about thirty thousand tensors."""

Value = int | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Metadata value. Integers are unsigned 32-bit, floats 32-bit."""

_MAGIC, _VERSION = b"GGUF", 3
_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"
_SUMS, _OWN_SUM = "llmaas.checksums", "llmaas.header_checksum"


@dataclass(frozen=True, slots=True)
class Part:
    """Tensor of a file.

    Attributes:
        name: Name of the tensor.
        type: ``ggml_type`` of the tensor.
        shape: Shape in NumPy's order, columns last.
    """

    name: str
    type: int
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        n_values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        return math.prod(self.shape) // n_values * n_bytes


@dataclass(frozen=True)
class ContainerHeader:
    """Header of a file.

    Attributes:
        architecture: Kind of the file.
        fields: Metadata other than alignment and checksums.
        parts: Tensors in file order.
    """

    architecture: str
    fields: Mapping[str, Value]
    parts: tuple[Part, ...]

    @lazy
    def places(self) -> dict[str, int]:
        """Offset of each tensor."""
        at, places = _padded(len(self.blank)), {}
        for part in self.parts:
            places[part.name] = at
            at += _padded(part.n_bytes)
        return places

    @property
    def n_bytes(self) -> int:
        """Size of the whole file."""
        return _padded(len(self.blank)) + sum(_padded(part.n_bytes) for part in self.parts)

    @property
    def sums_at(self) -> int:
        """Offset of the tensors' checksums, 4 bytes each."""
        return len(self._before_sums)

    @lazy
    def blank(self) -> bytes:
        """Bytes of the header, with zeros for all checksums."""
        own = _entry(_OWN_SUM, 0)
        return self._before_sums + bytes(4 * len(self.parts)) + own + self._infos

    def with_sums(self, sums: Iterable[int]) -> bytes:
        """Return the header's bytes with these checksums of tensors, and with its own checksum."""
        values = struct.pack(f"<{len(self.parts)}I", *sums)
        end = self.sums_at + len(values)
        content = bytearray(self.blank)
        content[self.sums_at : end] = values
        own_end = len(content) - len(self._infos)
        content[own_end - 4 : own_end] = struct.pack("<I", crc32c(bytes(content)))
        return bytes(content)

    def sums_in(self, content: bytes) -> list[int] | None:
        """Return the tensors' checksums in a file's first bytes, or None if its header differs."""
        end = self.sums_at + 4 * len(self.parts)
        own_end = len(self.blank) - len(self._infos)
        is_own = (
            len(content) >= len(self.blank)
            and content[: self.sums_at] == self._before_sums
            and content[end : own_end - 4] == self.blank[end : own_end - 4]
            and content[own_end : len(self.blank)] == self._infos
        )
        sums = content[self.sums_at : end]
        return list(struct.unpack(f"<{len(self.parts)}I", sums)) if is_own else None

    @lazy
    def _before_sums(self) -> bytes:
        own: dict[str, Value] = {_ARCHITECTURE: self.architecture, _ALIGNMENT: ALIGNMENT}
        fields = own | dict(self.fields)
        counts = struct.pack("<IQQ", _VERSION, len(self.parts), len(fields) + 2)
        entries = b"".join(_entry(name, value) for name, value in fields.items())
        sums = _entry(_SUMS, (0,) * len(self.parts))
        return _MAGIC + counts + entries + sums[: -4 * len(self.parts)]

    @lazy
    def _infos(self) -> bytes:
        at, infos = 0, []
        for part in self.parts:
            infos.append(tensor_entry(part.name, part.type, part.shape[::-1], at))
            at += _padded(part.n_bytes)
        return b"".join(infos)


def parse_header(content: bytes) -> tuple[ContainerHeader, list[int]]:
    """Return the header and the tensors' checksums from the first bytes of a file.

    Raises:
        ValueError: The bytes are no valid header of this plugin.
    """
    found = gguf_header.parse_header(content, sys.maxsize)  # callers check the file's size
    fields = {name: _value(name, value) for name, value in found.fields.items()}
    parts = tuple(
        Part(name, int(tensor.type), tensor.shape[::-1]) for name, tensor in found.tensors.items()
    )
    architecture, sums = fields.pop(_ARCHITECTURE, ""), fields.pop(_SUMS, ())
    for name in (_ALIGNMENT, _OWN_SUM):
        fields.pop(name, None)
    header = ContainerHeader(str(architecture), fields, parts)
    if not parts:
        raise ValueError("it has no tensors")
    if not isinstance(sums, tuple) or not all(type(value) is int for value in sums):
        raise ValueError("its checksums are not whole numbers")
    if len(sums) != len(parts):
        raise ValueError(f"it has {len(sums)} checksums, expected {len(parts)}")
    values = [int(value) for value in sums]
    if header.with_sums(values) != content[: len(header.blank)]:
        raise ValueError("its metadata differs from what was written, or is incomplete")
    return header, values


def _entry(name: str, value: Value) -> bytes:
    if isinstance(value, tuple) and not _are_strings(value):
        return entry(name, np.array(value, "<u4" if isinstance(value[0], int) else "<f4"))
    return entry(name, value)


def _are_strings(value: tuple[object, ...]) -> TypeGuard[tuple[str, ...]]:
    return isinstance(value[0], str)


def _value(name: str, value: FieldValue) -> Value:
    """Return a value that was read as one that ``_entry`` writes.

    Raises:
        ValueError: This plugin writes no such values.
    """
    if isinstance(value, np.ndarray) and value.dtype in ("<u4", "<f4"):
        value = tuple(value.tolist())
    if (type(value) is int and value < 1 << 32) or isinstance(value, str):
        return value
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"its field {name!r} has a value of an unexpected type, or an empty array")
    return value


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
