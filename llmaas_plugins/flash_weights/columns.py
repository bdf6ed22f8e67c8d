"""Columns of a matrix, each stored contiguously, for products with only some of them.

A column stores its numbers for all rows in chunks of 128 rows; the last chunk is padded. Numbers
have 4 bits (rows k and 64 + k of a chunk are in byte k, 8 means zero) or 8 bits (128 means zero).
They are the numbers of Q4_0 and Q8_0, or of Q4_1 and Q4_K. The numbers of Q4_1 and Q4_K are not
negative: a minimum is subtracted from their products with scales. A matrix of any other type is
quantized to Q8_0. Scales and minimums are stored separately, one for each row and block of 32
columns.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.container_file import Bytes

__all__ = [
    "BLOCK_COLUMNS",
    "CHUNK_ROWS",
    "Scales",
    "column_bits",
    "column_bytes",
    "has_mins",
    "pack_columns",
    "padded_rows",
    "parts_of",
]

BLOCK_COLUMNS = 32
CHUNK_ROWS = 128
_LINE_BYTES = 64

_WITH_MINS = (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)
_Halves = NDArray[np.float16]


class Scales(NamedTuple):
    """Factors that turn a matrix's numbers into values, by block of columns and padded row.

    Attributes:
        scales: Factors of the numbers.
        mins: Values to subtract after scaling; None for types without mins.
    """

    scales: _Halves
    mins: _Halves | None


def column_bits(info: TensorInfo) -> int | None:
    """Return the bits of each number, or None for a type that cannot be converted to Q8_0."""
    if info.type in (GGMLQuantizationType.Q4_0, *_WITH_MINS):
        return 4
    return 8 if _is_readable(info.type) else None


def has_mins(info: TensorInfo) -> bool:
    """Return whether the type subtracts mins after scaling."""
    return info.type in _WITH_MINS


def padded_rows(info: TensorInfo) -> int:
    """Return the number of rows, rounded up to whole chunks."""
    return -(-info.shape[1] // CHUNK_ROWS) * CHUNK_ROWS


def column_bytes(info: TensorInfo, n_bits: int) -> int:
    """Return the bytes of a column."""
    return padded_rows(info) * n_bits // 8


def pack_columns(info: TensorInfo, content: Bytes, order: NDArray[np.int32], into: Bytes) -> Scales:
    """Pack a matrix's columns into the rows of an array.

    Args:
        info: Type and shape of the matrix.
        content: Bytes of the matrix.
        order: Column to store in each row of ``into``.
        into: Array with ``column_bytes`` for each column.

    Returns:
        Scales and mins of the matrix.
    """
    n_columns, n_rows, _ = info.shape
    rows = content.reshape(n_rows, -1)
    n_blocks = n_columns // BLOCK_COLUMNS
    factors = np.zeros((2 if has_mins(info) else 1, n_blocks, padded_rows(info)), np.float16)
    columns_of = _columns_of_4 if column_bits(info) == 4 else _columns_of_8
    chunk_bytes = into.shape[1] * CHUNK_ROWS // padded_rows(info)
    for i, first in enumerate(range(0, n_rows, CHUNK_ROWS)):
        chunk = rows[first : first + CHUNK_ROWS]
        numbers, of_rows = parts_of(GGMLQuantizationType(info.type), chunk)
        for all_rows, these in zip(factors, of_rows, strict=True):
            all_rows[:, first : first + len(chunk)] = these.reshape(len(chunk), n_blocks).T
        into[:, i * chunk_bytes : (i + 1) * chunk_bytes] = columns_of(numbers)[order]
    return Scales(factors[0], factors[1] if has_mins(info) else None)


def parts_of(kind: GGMLQuantizationType, rows: Bytes) -> tuple[Bytes, list[_Halves]]:
    """Return numbers, ``(n_rows, n_groups, n_bytes)``; and scales, with mins if any, by rows."""
    match kind:
        case GGMLQuantizationType.Q4_0 | GGMLQuantizationType.Q8_0:
            scales, numbers = _cut(kind, rows, 2)
            return numbers, [_halves(scales)]
        case GGMLQuantizationType.Q4_1:
            scales, mins, numbers = _cut(kind, rows, 2, 2)
            return numbers, [_halves(scales), -_halves(mins)]
        case GGMLQuantizationType.Q4_K:
            return _parts_of_q4_k(rows)
    values = quants.dequantize(_as_stored(kind, rows), kind)
    quantized = quants.quantize(values, GGMLQuantizationType.Q8_0)
    return parts_of(GGMLQuantizationType.Q8_0, quantized)


def _parts_of_q4_k(rows: Bytes) -> tuple[Bytes, list[_Halves]]:
    """Return the parts of Q4_K rows.

    Eight blocks share a scale of their scales and a scale of their mins; two blocks share bytes.
    """
    of_scales, of_mins, shares, numbers = _cut(GGMLQuantizationType.Q4_K, rows, 2, 2, 12)
    scales, mins = quants.Q4_K.get_scale_min(shares.reshape(-1, shares.shape[-1]))
    factors = [
        (_halves(of).reshape(-1, 1) * each.astype(np.float32)).astype(np.float16)
        for of, each in ((of_scales, scales), (of_mins, mins))
    ]
    return numbers.reshape(len(rows), -1, BLOCK_COLUMNS), factors


def _cut(kind: GGMLQuantizationType, rows: Bytes, *sizes: int) -> list[Bytes]:
    """Split the blocks of rows into pieces of these sizes and the remainder."""
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    return np.split(blocks, np.cumsum(sizes), axis=-1)


def _halves(content: Bytes) -> _Halves:
    return content.copy().view(np.float16)


def _columns_of_4(numbers: Bytes) -> Bytes:
    """Return the columns of a chunk of rows; byte j of a group of n has columns j and n + j."""
    _, n_groups, n_bytes = numbers.shape
    columns = _transposed(numbers, 0x88)
    low, high = columns[:, : CHUNK_ROWS // 2], columns[:, CHUNK_ROWS // 2 :]
    halves = np.empty((n_groups, 2, n_bytes, CHUNK_ROWS // 2), np.uint8)
    shape = halves[:, 0].shape
    halves[:, 0] = ((low & 0x0F) | (high << 4)).reshape(shape)
    halves[:, 1] = ((low >> 4) | (high & 0xF0)).reshape(shape)
    return halves.reshape(n_groups * 2 * n_bytes, -1)


def _columns_of_8(numbers: Bytes) -> Bytes:
    return _transposed(numbers, 0) ^ np.uint8(0x80)


def _transposed(numbers: Bytes, zero: int) -> Bytes:
    """Return the bytes of a chunk of rows by columns."""
    n_rows, *rest = numbers.shape
    n_columns = math.prod(rest)
    # Pad the rows: at strides of a power of two they would compete for a few cache lines.
    rows = np.empty((CHUNK_ROWS, n_columns + _LINE_BYTES), np.uint8)[:, :n_columns]
    rows[:n_rows].reshape(numbers.shape)[:] = numbers
    rows[n_rows:] = zero
    return np.ascontiguousarray(rows.T)


def _as_stored(kind: int, rows: Bytes) -> NDArray[np.generic]:
    """View rows in the type that gguf expects: their own float type, or bytes."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return rows.view(plain.get(GGMLQuantizationType(kind), np.uint8))


@functools.cache
def _is_readable(kind: int) -> bool:
    """Return whether gguf can dequantize the type."""
    n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]
    try:
        quants.dequantize(
            _as_stored(kind, np.zeros((1, n_bytes), np.uint8)), GGMLQuantizationType(kind)
        )
    except NotImplementedError:
        return False
    return True
