"""Format of this plugin's GGUF files: their header, and how it is parsed.

Each tensor starts at a multiple of 4 KiB, so reads need no copy. The metadata has a checksum of
each tensor, and one of the header itself. A file may come from anybody. A header is accepted only
if ``Header`` reproduces it byte for byte from the parsed values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from llmaas_plugins._native import crc32c
from llmaas_plugins.lazy import lazy

__all__ = ["ALIGNMENT", "MOST_HEADER_BYTES", "Header", "Part", "Value", "parse_header"]

ALIGNMENT = 4096
MOST_HEADER_BYTES = 4 << 20
"""Largest header: enough for about thirty thousand tensors."""

Value = int | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Metadata value. Integers are unsigned 32-bit, floats 32-bit."""

_MAGIC, _VERSION = b"GGUF", 3
_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"
_SUMS, _OWN_SUM = "llmaas.checksums", "llmaas.header_checksum"
_CODES = {GGUFValueType.UINT32: "I", GGUFValueType.FLOAT32: "f"}


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
class Header:
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
            dims = struct.pack(f"<I{len(part.shape)}Q", len(part.shape), *reversed(part.shape))
            infos.append(_text(part.name) + dims + struct.pack("<IQ", part.type, at))
            at += _padded(part.n_bytes)
        return b"".join(infos)


def parse_header(content: bytes) -> tuple[Header, list[int]]:
    """Return the header and the tensors' checksums from the first bytes of a file.

    Raises:
        ValueError: The bytes are no valid header of this plugin.
    """
    try:
        return _parsed(content)
    except struct.error as error:
        raise ValueError(f"its sizes are impossible ({error})") from error


def _parsed(content: bytes) -> tuple[Header, list[int]]:
    cursor = _Cursor(content)
    magic, version, n_parts, n_fields = struct.unpack("<4sIQQ", cursor.take(24))
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError("it is no GGUF file")
    fields = dict(cursor.field() for _ in range(n_fields))
    parts = tuple(cursor.part() for _ in range(n_parts))
    architecture, sums = fields.pop(_ARCHITECTURE, ""), fields.pop(_SUMS, ())
    for name in (_ALIGNMENT, _OWN_SUM):
        fields.pop(name, None)
    header = Header(str(architecture), fields, parts)
    if not parts or len({part.name for part in parts}) < len(parts):
        raise ValueError("it has no tensors, or two of the same name")
    if not isinstance(sums, tuple) or not all(type(value) is int for value in sums):
        raise ValueError("its checksums are not whole numbers")
    if len(sums) != len(parts):
        raise ValueError(f"it has {len(sums)} checksums, expected {len(parts)}")
    values = [int(value) for value in sums]
    if header.with_sums(values) != content[: len(header.blank)]:
        raise ValueError("its metadata differs from what was written, or is incomplete")
    return header, values


class _Cursor:
    """Sequential reader of a header; raises ``ValueError`` at its end."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def take(self, n: int) -> bytes:
        if n > len(self._content) - self._at:
            raise ValueError("its metadata is truncated")
        taken = self._content[self._at : self._at + n]
        self._at += n
        return taken

    def field(self) -> tuple[str, Value]:
        return self._text(), self._value(self._number("I"))

    def part(self) -> Part:
        name = self._text()
        n_dims = self._number("I")
        dims = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims))
        part = Part(name, self._number("I"), dims[::-1])
        self._number("Q")
        if not 1 <= n_dims <= 4 or dims[0] % GGML_QUANT_SIZES[GGMLQuantizationType(part.type)][0]:
            raise ValueError(f"{name!r} has an impossible shape")
        return part

    def _value(self, kind: int) -> Value:
        if kind == GGUFValueType.UINT32:
            return self._number("I")
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            raise ValueError("its metadata has values of an unexpected type")
        of, n = self._number("I"), self._number("Q")
        if n == 0 or of not in (GGUFValueType.STRING, *_CODES):
            raise ValueError("its metadata has an unexpected array")
        if of == GGUFValueType.STRING:
            return tuple(self._text() for _ in range(n))
        taken = self.take(4 * n)
        return struct.unpack(f"<{n}{_CODES[GGUFValueType(of)]}", taken)

    def _number(self, code: str) -> int:
        (number,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return int(number)

    def _text(self) -> str:
        return self.take(self._number("Q")).decode()


def _entry(name: str, value: Value) -> bytes:
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", GGUFValueType.STRING) + _text(value)
    if isinstance(value, int):
        return _text(name) + struct.pack("<II", GGUFValueType.UINT32, value)
    return _text(name) + struct.pack("<I", GGUFValueType.ARRAY) + _array(value)


def _array(values: Sequence[int] | Sequence[float] | Sequence[str]) -> bytes:
    if isinstance(values[0], str):
        texts = b"".join(map(_text, values))  # type: ignore[arg-type]
        return struct.pack("<IQ", GGUFValueType.STRING, len(values)) + texts
    kind = GGUFValueType.UINT32 if isinstance(values[0], int) else GGUFValueType.FLOAT32
    return struct.pack(f"<IQ{len(values)}{_CODES[kind]}", kind, len(values), *values)


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
