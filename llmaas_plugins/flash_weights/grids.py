"""Matrices as the channel file stores them: whole numbers, with factors for blocks of columns.

A distilled matrix has new numbers and factors of the same shape. It is packed from blocks of the
type with such a layout: Q4_0, Q4_1 (also for Q4_K) or Q8_0 (for all other types).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.channel_layout import Piece
from llmaas_plugins.flash_weights.channels import CHANNEL_FILE, ChannelFile, Channels, open_scales
from llmaas_plugins.flash_weights.columns import (
    BLOCK_COLUMNS,
    CHUNK_ROWS,
    Scales,
    column_bits,
    has_mins,
    parts_of,
)
from llmaas_plugins.flash_weights.container_file import Bytes, ContainerFile

__all__ = ["Grid", "grid_of", "matrices_in", "stored"]


class Grid(NamedTuple):
    """Matrix as whole numbers with factors. A value is ``scale * number - min``.

    Attributes:
        numbers: Numbers, ``(n_rows, n_columns)``.
        scales: Factors of the numbers, ``(n_rows, n_columns / 32)``.
        mins: Values to subtract, shaped as ``scales``; None for types without mins.
        least: Least number that can be stored.
        most: Largest number that can be stored.
    """

    numbers: NDArray[np.int8]
    scales: NDArray[np.float16]
    mins: NDArray[np.float16] | None
    least: int
    most: int

    @property
    def values(self) -> NDArray[np.float32]:
        """Values of the matrix."""
        blocks = self.numbers.reshape(*self.scales.shape, -1).astype(np.float32)
        values = blocks * self.scales.astype(np.float32)[..., None]
        if self.mins is not None:
            values -= self.mins.astype(np.float32)[..., None]
        return values.reshape(self.numbers.shape)


def grid_of(info: TensorInfo, content: Bytes) -> Grid:
    """Return a model's matrix as the channel file stores it.

    Args:
        info: Type and shape of the matrix.
        content: Bytes of the matrix.
    """
    rows = content.reshape(info.shape[1], -1)
    numbers, factors = parts_of(GGMLQuantizationType(info.type), rows)
    scales = factors[0].reshape(len(rows), -1)
    mins = factors[1].reshape(len(rows), -1) if has_mins(info) else None
    if column_bits(info) == 8:
        return Grid(numbers.reshape(len(rows), -1).view(np.int8), scales, mins, -127, 127)
    both = np.concatenate([numbers & 0x0F, numbers >> 4], -1).reshape(len(rows), -1)
    zero = 0 if has_mins(info) else 8
    return Grid(both.view(np.int8) - np.int8(zero), scales, mins, -zero, 15 - zero)


def stored(info: TensorInfo, grid: Grid) -> tuple[TensorInfo, Bytes]:
    """Return a matrix in blocks of a type whose columns are packed as those of ``info``."""
    numbers = grid.numbers.reshape(*grid.scales.shape, BLOCK_COLUMNS)
    factors = [grid.scales] if grid.mins is None else [grid.scales, -grid.mins]
    if column_bits(info) == 8:
        kind, packed = GGMLQuantizationType.Q8_0, numbers.view(np.uint8)
    else:
        kind = GGMLQuantizationType.Q4_0 if grid.mins is None else GGMLQuantizationType.Q4_1
        low, high = np.split((numbers - np.int8(grid.least)).view(np.uint8), 2, axis=-1)
        packed = low | (high << np.uint8(4))
    parts = [np.ascontiguousarray(each)[..., None].view(np.uint8) for each in factors]
    content = np.concatenate([*parts, packed], -1).reshape(-1)
    return dataclasses.replace(info, type=int(kind), n_bytes=content.size), content


def matrices_in(file: ChannelFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the name and the values of each matrix in a channel file, one at a time.

    Raises:
        StoreError: The file was replaced, or is damaged.
    """
    with ContainerFile(file.path, CHANNEL_FILE) as content, open_scales(file) as read_scales:
        for (index, family), members in itertools.groupby(
            file.operands.values(), lambda one: one.group
        ):
            layers = list(members)
            records = content.read(f"group.{index}.{family}").reshape(len(layers[0].order), -1)
            at = 0
            for channels in layers:
                for piece in channels.pieces:
                    first = at + piece.offset
                    columns = records[:, first : first + piece.n_bytes]
                    yield piece.name, _matrix(channels, piece, columns, read_scales(piece))
                at += channels.n_bytes


def _matrix(
    channels: Channels, piece: Piece, columns: Bytes, factors: Scales
) -> NDArray[np.float32]:
    """Return a matrix, ``(n_rows, n_columns)``, from its columns in record order."""
    if piece.n_bits == 4:
        halves = columns.reshape(len(columns), -1, CHUNK_ROWS // 2)
        columns = np.concatenate([halves & 0x0F, halves >> 4], -1).reshape(len(columns), -1)
    zero = 0 if piece.has_mins else 1 << (piece.n_bits - 1)
    least, most = -zero, (1 << piece.n_bits) - 1 - zero
    numbers = np.empty((piece.n_rows, len(columns)), np.int8)
    numbers[:, channels.order] = (columns[:, : piece.n_rows].astype(np.int16) - zero).T
    scales = factors.scales[:, : piece.n_rows].T
    mins = None if factors.mins is None else factors.mins[:, : piece.n_rows].T
    return Grid(numbers, scales, mins, least, most).values
