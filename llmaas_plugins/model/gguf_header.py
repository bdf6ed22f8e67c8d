"""Read headers of GGUF files: metadata, and where the tensors are.

No objects are built for the tokens of the vocabulary, so a header of 128,000 tokens takes only a
tenth of a second. A file may come from anybody, so every value is checked.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, StoreError, forks
from llmaas_plugins.files.file_bytes import OPEN_FLAGS
from llmaas_plugins.model.gguf_entries import (
    ARRAY,
    ARRAY_KIND,
    DTYPES,
    KIND,
    LENGTH,
    STRING_KIND,
)

if TYPE_CHECKING:  # importing gguf takes 3 MiB
    from gguf.constants import GGMLQuantizationType

__all__ = [
    "GGUFHeader",
    "GGUFTensor",
    "Outline",
    "Value",
    "field_names",
    "header_of",
    "parse_header",
    "read_header",
    "read_outline",
]

Value = int | float | bool | str | NDArray[Any] | tuple[str, ...] | None
"""Value of a field; None for an array of strings that was skipped."""

_Found = TypeVar("_Found")
_Info = tuple[int, tuple[int, ...], int]
"""Type, shape and offset of a tensor, as the header has them."""
_FIRST_BYTES, _MOST_BYTES = 256 << 10, 256 << 20
_MOST_ENTRIES = 1 << 16
_START = struct.Struct("<4sIQQ")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Type, shape and location of a tensor in a file.

    Attributes:
        type: ``ggml_type`` of the tensor.
        shape: Shape in GGUF's order, columns first.
        at: Offset in the file.
        n_bytes: Size of the tensor.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    at: int
    n_bytes: int

    @property
    def n_columns(self) -> int:
        """Number of values of a row."""
        return self.shape[0]

    @property
    def n_rows(self) -> int:
        """Number of rows of all matrices; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def block_columns(self) -> int:
        """Number of columns that are quantized together."""
        return int(_constants().GGML_QUANT_SIZES[self.type][0])


@dataclass(frozen=True, slots=True, eq=False)
class GGUFHeader:
    """Header of a file.

    Attributes:
        fields: Metadata values by key.
        spans: Start and end of each field's entry.
        tensors: Tensors by name, in header order.
        infos_at: Start of the header's tensor entries, after the last field.
        infos_end: End of the tensor entries.
        data_at: Start of the tensors' bytes.
        n_bytes: Size of the file.
    """

    fields: Mapping[str, Value]
    spans: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, GGUFTensor]
    infos_at: int
    infos_end: int
    data_at: int
    n_bytes: int

    @property
    def alignment(self) -> int:
        """Alignment of the tensors' offsets."""
        return _alignment(self.fields)

    def whole_number(self, key: str) -> int | None:
        """Return a whole number; of an array, the value that all its elements share.

        Return None if the field is missing, no integer, or an array of different values.
        """
        value = self.fields.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        return value if isinstance(value, int) else None


class Outline(NamedTuple):
    """Part of a header.

    Attributes:
        fields: Metadata values by key.
        shapes: Shapes of the tensors by name, columns first.
    """

    fields: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file.

    Raises:
        ConfigError: The file is no GGUF file of this processor's byte order, or is damaged.
        StoreError: The file cannot be read.
    """
    return _read(path, _Cursor.header)


def header_of(fd: int) -> tuple[GGUFHeader, bytes] | None:
    """Read the header of an open file; return it with the file's bytes before the tensors' bytes.

    Return None if the file is no GGUF file of this processor's byte order, or is damaged.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with os.fdopen(os.dup(fd), "rb") as file:
            header = _parsed(file, os.fstat(fd), _Cursor.header)
            file.seek(0)
            return header, file.read(header.data_at)
    except (ValueError, struct.error):
        return None


def field_names(fd: int) -> frozenset[str]:
    """Return the names of an open file's fields; none if it is no GGUF file, or is damaged.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with os.fdopen(os.dup(fd), "rb") as file:
            return _parsed(file, os.fstat(fd), lambda cursor, _: cursor.field_names())
    except (ValueError, struct.error):
        return frozenset()


def read_outline(path: Path) -> Outline:
    """Read a file's fields and the shapes of its tensors, and check nothing else about them.

    Tensors may be of types that nobody here knows.

    Raises:
        ConfigError: The file is no GGUF file of this processor's byte order, or is damaged.
        StoreError: The file cannot be read.
    """
    return _read(path, lambda cursor, _: cursor.outline())


def parse_header(content: bytes, n_bytes: int) -> GGUFHeader:
    """Return the header that bytes begin with, including its arrays of strings.

    Args:
        content: The first bytes of a file, with its whole header.
        n_bytes: Size of the file.

    Raises:
        ValueError: The bytes are no GGUF header, or tensors are beyond the end of the file.
    """
    try:
        return _Cursor(content, keeps_strings=True).header(n_bytes)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"its sizes are impossible ({error})") from error


# -- inside --------------------------------------------------------------------------------------


class _CutOffError(ValueError):
    """More bytes are needed than were given."""


_Parse = Callable[["_Cursor", int], _Found]
"""Function that parses the wanted part of a header, given a cursor and the size of the file."""


def _read(path: Path, parse: _Parse[_Found]) -> _Found:
    """Open a file and parse its header.

    Raises:
        ConfigError: The file is no GGUF file of this processor's byte order, or is damaged.
        StoreError: The file cannot be read.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | OPEN_FLAGS), "rb") as file:
            return _parsed(file, os.fstat(file.fileno()), parse)
    except (ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a GGUF file, or is damaged: {error}.") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error


def _parsed(file: Any, status: os.stat_result, parse: _Parse[_Found]) -> _Found:
    """Parse a header, reading more of the file until the header is complete."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    room = _FIRST_BYTES
    while True:
        file.seek(0)
        content = file.read(room)
        try:
            return parse(_Cursor(content), status.st_size)
        except (_CutOffError, struct.error):
            if len(content) >= min(status.st_size, _MOST_BYTES):
                raise
        room = min(room * 4, _MOST_BYTES)


class _Cursor:
    """Sequential reader of a header."""

    def __init__(self, content: bytes, *, keeps_strings: bool = False) -> None:
        self._content, self._at = content, 0
        self._keeps_strings = keeps_strings

    def field_names(self) -> frozenset[str]:
        return frozenset(self._fields(self._counts()[1])[0])

    def outline(self) -> Outline:
        n_tensors, n_fields = self._counts()
        fields, _ = self._fields(n_fields)
        infos = (self._info() for _ in range(n_tensors))
        return Outline(fields, {name: shape for name, (_, shape, _) in infos})

    def header(self, n_bytes: int) -> GGUFHeader:
        n_tensors, n_fields = self._counts()
        fields, spans = self._fields(n_fields)
        infos_at = self._at
        infos = [self._info() for _ in range(n_tensors)]
        infos_end = self._at
        alignment = _alignment(fields)
        data_at = -(-infos_end // alignment) * alignment
        tensors = {name: _tensor(name, info, data_at, n_bytes) for name, info in infos}
        if len(tensors) < n_tensors:
            raise ValueError("it has two tensors of the same name")
        return GGUFHeader(fields, spans, tensors, infos_at, infos_end, data_at, n_bytes)

    def _counts(self) -> tuple[int, int]:
        if not self._content.startswith(b"GGUF"):
            raise ValueError("it does not begin with GGUF" if self._content else "it is empty")
        _magic, version, n_tensors, n_fields = _START.unpack(self._take(_START.size))
        if version not in (2, 3):
            raise ValueError(f"it is of GGUF version {version}, expected 2 or 3")
        if max(n_tensors, n_fields) > _MOST_ENTRIES:
            raise ValueError(f"it claims {n_tensors:,} tensors and {n_fields:,} fields")
        return n_tensors, n_fields

    def _fields(self, n: int) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
        fields, spans = dict[str, Value](), dict[str, tuple[int, int]]()
        for _ in range(n):
            at = self._at
            name = self._text()
            if name in fields:
                raise ValueError(f"it has the field {name!r} twice")
            fields[name] = self._value(*KIND.unpack(self._take(4)))
            spans[name] = at, self._at
        return fields, spans

    def _value(self, kind: int) -> Value:
        if kind == STRING_KIND:
            return self._text()
        if kind == ARRAY_KIND:
            return self._array(*ARRAY.unpack(self._take(ARRAY.size)))
        value: Value = self._numbers(kind, 1)[0].item()
        return value

    def _array(self, kind: int, n: int) -> Value:
        if kind != STRING_KIND:
            return self._numbers(kind, n)
        if self._keeps_strings:
            return tuple(self._text() for _ in range(n))
        content, at, unpack = self._content, self._at, LENGTH.unpack_from
        try:
            for _ in range(n):
                at += 8 + unpack(content, at)[0]
        except (struct.error, OverflowError) as error:
            raise _CutOffError("its metadata is truncated") from error
        self._at = at
        self._take(0)
        return None

    def _numbers(self, kind: int, n: int) -> NDArray[Any]:
        if kind not in DTYPES:
            raise ValueError(f"its metadata has values of the unknown type {kind}")
        dtype = DTYPES[kind]
        return np.frombuffer(self._take(n * dtype.itemsize), dtype)

    def _info(self) -> tuple[str, _Info]:
        name = self._text()
        (n_dims,) = KIND.unpack(self._take(4))
        if not 1 <= n_dims <= 4:
            raise ValueError(f"{name!r} has {n_dims} dimensions")
        dims = struct.unpack(f"<{n_dims}Q", self._take(8 * n_dims))
        kind, at = ARRAY.unpack(self._take(ARRAY.size))
        return name, (kind, dims, at)

    def _text(self) -> str:
        return self._take(*LENGTH.unpack(self._take(8))).decode(errors="replace")

    def _take(self, n: int) -> bytes:
        if n > len(self._content) - self._at:
            raise _CutOffError("its metadata is truncated")
        taken = self._content[self._at : self._at + n]
        self._at += n
        return taken


@functools.cache
def _constants() -> Any:
    """Import and return ``gguf.constants``."""
    with forks.postponed():  # a child could not finish another thread's import
        from gguf import constants
    return constants


def _tensor(name: str, info: _Info, data_at: int, end: int) -> GGUFTensor:
    kind, shape, at = info
    try:
        type_ = _constants().GGMLQuantizationType(kind)
        block_columns, block_bytes = _constants().GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name!r} has the unknown type {kind}") from error
    if min(shape) < 1 or shape[0] % block_columns:
        raise ValueError(f"{name!r} has an impossible shape")
    n_bytes = math.prod(shape) // block_columns * block_bytes
    if data_at + at + n_bytes > end:
        raise ValueError(f"the file ends before {name!r} does")
    return GGUFTensor(type_, shape, data_at + at, n_bytes)


def _alignment(fields: Mapping[str, Value]) -> int:
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}")
    return alignment
