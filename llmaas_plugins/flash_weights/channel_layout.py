"""Layout of the channel file: groups of layers, their tensors, and the bytes of a channel."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.columns import (
    BLOCK_COLUMNS,
    column_bits,
    column_bytes,
    has_mins,
    padded_rows,
)
from llmaas_plugins.flash_weights.container import Part
from llmaas_plugins.flash_weights.operands import FAMILIES, Operand, operands

__all__ = [
    "Group",
    "OperandKey",
    "Piece",
    "channel_operands",
    "groups_of",
    "key_of",
    "predictors_of",
]

OperandKey = tuple[int, str]
"""Layer and family of an operand."""


def key_of(operand: Operand) -> OperandKey:
    """Return the key of an operand."""
    return operand.layer, operand.family


def channel_operands(tensors: Mapping[str, TensorInfo]) -> list[Operand]:
    """Return the operands whose channels can be read one by one.

    Their width must be whole blocks, and their matrices must have types that can be decoded.
    """
    return [
        operand
        for operand in operands(tensors)
        if operand.n_channels % BLOCK_COLUMNS == 0
        and all(column_bits(tensors[name]) for name in operand.weights)
    ]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a channel that belongs to one matrix.

    Attributes:
        name: Name of the matrix.
        n_rows: Number of rows of the matrix.
        n_padded_rows: Number of rows, rounded up to whole chunks.
        n_bits: Bits of each number.
        offset: Offset of the piece within its layer's bytes of the channel.
        n_bytes: Bytes of the piece.
        has_mins: Whether the matrix has mins beside scales.
    """

    name: str
    n_rows: int
    n_padded_rows: int
    n_bits: int
    offset: int
    n_bytes: int
    has_mins: bool


@dataclass(frozen=True)
class Group:
    """Operands of consecutive layers whose channels are side by side in the file.

    Attributes:
        index: Index of the group.
        operands: Operands by layer.
        pieces: Pieces of each operand.
    """

    index: int
    operands: tuple[Operand, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def name(self) -> str:
        """Suffix of the names of the group's tensors."""
        return f"{self.index}.{self.operands[0].family}"

    @property
    def n_channels(self) -> int:
        """Number of values of the activation."""
        return self.operands[0].n_channels

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of a channel in each layer."""
        return tuple(pieces[-1].offset + pieces[-1].n_bytes for pieces in self.pieces)

    @property
    def parts(self) -> list[Part]:
        """Tensors of the group: the order of channels, the channels, the scales of each matrix."""
        order = Part(f"order.{self.name}", GGMLQuantizationType.I32, (self.n_channels,))
        shape = self.n_channels, sum(self.layer_bytes)
        channels = Part(f"group.{self.name}", GGMLQuantizationType.I8, shape)
        return [order, channels, *self.scales]

    @property
    def scales(self) -> list[Part]:
        """Scales of each matrix, followed by its mins if it has any."""
        parts = []
        for piece in itertools.chain(*self.pieces):
            shape = self.n_channels // BLOCK_COLUMNS, piece.n_padded_rows
            names = ("scales", "mins") if piece.has_mins else ("scales",)
            parts += [
                Part(f"{name}.{piece.name}", GGMLQuantizationType.F16, shape) for name in names
            ]
        return parts


def groups_of(
    keys: Collection[OperandKey], tensors: Mapping[str, TensorInfo], n_layers: int
) -> list[Group]:
    """Return groups of ``n_layers`` layers each, made from the operands with these keys.

    A layer is left out if its activation has another width than the first of its group.
    """
    named = [one for one in channel_operands(tensors) if key_of(one) in keys]
    groups = []
    for index, members in itertools.groupby(named, lambda one: one.layer // n_layers):
        layers = list(members)
        for family in FAMILIES:
            found = [one for one in layers if one.family == family]
            same = tuple(one for one in found if one.n_channels == found[0].n_channels)
            if same:
                pieces = tuple(tuple(_pieces(one.weights, tensors)) for one in same)
                groups.append(Group(index, same, pieces))
    return groups


def predictors_of(operands: Sequence[Operand], group_layers: int) -> dict[int, int]:
    """Return the predictor of each operand, by their places in the sequence.

    The predictor is the operand of the first layer in the group before. It must have the same
    number of channels.
    """
    first: dict[tuple[int, str, int], int] = {}
    found = {}
    for place, operand in enumerate(operands):
        group, same = operand.layer // group_layers, (operand.family, operand.n_channels)
        first.setdefault((group, *same), place)
        predictor = first.get((group - 1, *same))
        if predictor is not None:
            found[place] = predictor
    return found


def _pieces(names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Iterator[Piece]:
    offset = 0
    for name in names:
        info = tensors[name]
        n_bits = column_bits(info) or 0
        n_bytes = column_bytes(info, n_bits)
        shape = info.shape[1], padded_rows(info)
        yield Piece(name, *shape, n_bits, offset, n_bytes, has_mins(info))
        offset += n_bytes
