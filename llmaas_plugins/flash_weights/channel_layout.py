"""Where the channel file has what: groups of layers, their tensors, a channel's bytes in them."""

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

__all__ = ["Group", "OperandKey", "Piece", "channel_operands", "groups_of", "key_of"]

OperandKey = tuple[int, str]
"""Layer and family."""


def key_of(operand: Operand) -> OperandKey:
    """What an operand is known by."""
    return operand.layer, operand.family


def channel_operands(tensors: Mapping[str, TensorInfo]) -> list[Operand]:
    """Those whose channels can be read one by one: whole blocks, of types that can be decoded."""
    return [
        operand
        for operand in operands(tensors)
        if operand.n_channels % BLOCK_COLUMNS == 0
        and all(column_bits(tensors[name]) for name in operand.weights)
    ]


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix's share of a channel.

    Attributes:
        name: Of the matrix.
        n_rows: Its rows.
        n_padded_rows: The same in whole chunks.
        n_bits: Of each number.
        offset: Where it begins in what its layer has of the channel.
        n_bytes: Its size.
        has_mins: Whether it has mins beside scales.
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
    """An activation of consecutive layers, whose channels are beside each other in the file.

    Attributes:
        index: Of the group.
        operands: By layer.
        pieces: Of each operand.
    """

    index: int
    operands: tuple[Operand, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def name(self) -> str:
        """What its tensors' names end with."""
        return f"{self.index}.{self.operands[0].family}"

    @property
    def n_channels(self) -> int:
        """Values of the activation."""
        return self.operands[0].n_channels

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """What each layer has of a channel."""
        return tuple(pieces[-1].offset + pieces[-1].n_bytes for pieces in self.pieces)

    @property
    def parts(self) -> list[Part]:
        """Its tensors: the order of channels, the channels, the scales of each matrix."""
        order = Part(f"order.{self.name}", GGMLQuantizationType.I32, (self.n_channels,))
        shape = self.n_channels, sum(self.layer_bytes)
        channels = Part(f"group.{self.name}", GGMLQuantizationType.I8, shape)
        return [order, channels, *self.scales]

    @property
    def scales(self) -> list[Part]:
        """Of them, the scales of each matrix, followed by its mins if it has any."""
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
    """Groups of ``n_layers`` layers each, from those of a model's operands that are named.

    Layers whose activation is not as long as that of the first of their group are left out.
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


def _pieces(names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Iterator[Piece]:
    offset = 0
    for name in names:
        info = tensors[name]
        n_bits = column_bits(info) or 0
        n_bytes = column_bytes(info, n_bits)
        shape = info.shape[1], padded_rows(info)
        yield Piece(name, *shape, n_bits, offset, n_bytes, has_mins(info))
        offset += n_bytes
