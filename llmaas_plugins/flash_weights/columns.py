"""A matrix's columns, each in one piece: what products with some of them read.

A column has its numbers for all rows in chunks of 128 rows, the last one padded with zeros of the
matrix. Numbers have 4 bits (rows k and 64 + k of a chunk in byte k, 8 is zero) or 8 (128 is zero).
They are those of Q4_0 and Q8_0; a matrix of another type is quantised to Q8_0. Its scales, one of
each row and block of 32 columns, are not in the columns.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.container_file import Bytes

__all__ = ["BLOCK_COLUMNS", "column_bits", "column_bytes", "pack_columns", "padded_rows"]

BLOCK_COLUMNS = 32
_CHUNK_ROWS = 128
_SCALE_BYTES = 2
_LINE_BYTES = 64


def column_bits(info: TensorInfo) -> int | None:
    """Bits of each number; None for a type that cannot be quantised anew."""
    if info.type == GGMLQuantizationType.Q4_0:
        return 4
    return 8 if _is_readable(info.type) else None


def padded_rows(info: TensorInfo) -> int:
    """Rows of whole chunks."""
    return -(-info.shape[1] // _CHUNK_ROWS) * _CHUNK_ROWS


def column_bytes(info: TensorInfo, n_bits: int) -> int:
    """Bytes of a column."""
    return padded_rows(info) * n_bits // 8


def pack_columns(
    info: TensorInfo, content: Bytes, order: NDArray[np.int32], into: Bytes
) -> NDArray[np.float16]:
    """Put a matrix's columns into the rows of an array.

    Args:
        info: What the matrix is.
        content: Its bytes.
        order: The column of each row of ``into``.
        into: Room of ``column_bytes`` for each column.

    Returns:
        Scales, by blocks of columns and padded rows.
    """
    n_columns, n_rows, _ = info.shape
    rows = content.reshape(n_rows, -1)
    scales = np.zeros((n_columns // BLOCK_COLUMNS, padded_rows(info)), np.float16)
    columns_of = _columns_of_4 if info.type == GGMLQuantizationType.Q4_0 else _columns_of_8
    chunk_bytes = into.shape[1] * _CHUNK_ROWS // padded_rows(info)
    for i, first in enumerate(range(0, n_rows, _CHUNK_ROWS)):
        blocks = _blocks(info, rows[first : first + _CHUNK_ROWS])
        of_rows = blocks[..., :_SCALE_BYTES].copy().view(np.float16)[..., 0]
        scales[:, first : first + len(blocks)] = of_rows.T
        columns = columns_of(blocks[..., _SCALE_BYTES:])
        into[:, i * chunk_bytes : (i + 1) * chunk_bytes] = columns[order]
    return scales


def _blocks(info: TensorInfo, rows: Bytes) -> Bytes:
    """Rows as blocks of Q4_0 or Q8_0: a scale, then numbers."""
    if info.type not in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0):
        values = quants.dequantize(_as_stored(info.type, rows), GGMLQuantizationType(info.type))
        rows = quants.quantize(values, GGMLQuantizationType.Q8_0)
    return rows.reshape(len(rows), info.shape[0] // BLOCK_COLUMNS, -1)


def _columns_of_4(numbers: Bytes) -> Bytes:
    """Columns of a chunk of rows; byte j of a block has columns j and 16 + j."""
    n_blocks = numbers.shape[1]
    columns = _transposed(numbers, 0x88)
    low, high = columns[:, : _CHUNK_ROWS // 2], columns[:, _CHUNK_ROWS // 2 :]
    halves = np.empty((n_blocks, 2, BLOCK_COLUMNS // 2, _CHUNK_ROWS // 2), np.uint8)
    shape = halves[:, 0].shape
    halves[:, 0] = ((low & 0x0F) | (high << 4)).reshape(shape)
    halves[:, 1] = ((low >> 4) | (high & 0xF0)).reshape(shape)
    return halves.reshape(n_blocks * BLOCK_COLUMNS, -1)


def _columns_of_8(numbers: Bytes) -> Bytes:
    return _transposed(numbers, 0) ^ np.uint8(0x80)


def _transposed(numbers: Bytes, zero: int) -> Bytes:
    """Bytes of a chunk of rows by columns."""
    n_rows, *rest = numbers.shape
    n_columns = math.prod(rest)
    # rows that are a power of two apart would share few lines of the cache
    rows = np.empty((_CHUNK_ROWS, n_columns + _LINE_BYTES), np.uint8)[:, :n_columns]
    rows[:n_rows].reshape(numbers.shape)[:] = numbers
    rows[n_rows:] = zero
    return np.ascontiguousarray(rows.T)


def _as_stored(kind: int, rows: Bytes) -> NDArray[np.generic]:
    """Rows in the type in which gguf has them: numbers of their own, or bytes."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return rows.view(plain.get(GGMLQuantizationType(kind), np.uint8))


@functools.cache
def _is_readable(kind: int) -> bool:
    """Whether gguf knows what values such numbers stand for."""
    n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]
    try:
        quants.dequantize(
            _as_stored(kind, np.zeros((1, n_bytes), np.uint8)), GGMLQuantizationType(kind)
        )
    except NotImplementedError:
        return False
    return True
