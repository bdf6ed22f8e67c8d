"""Reorder the units of a layer, which does not change the layer's result (§3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.units import Blocks, Scores
from llmaas_plugins.model.gguf_header import GGUFTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

__all__ = ["Bytes", "Move", "Order", "check_order", "inverse_of", "move_of", "moved", "order_by"]

Bytes = NDArray[np.uint8]

_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Order of units: the old unit at each new place.

    Attributes:
        groups: Old groups by new place; uint32, ``(n_layers, n_groups)``.
        neurons: Old neurons by new place; uint32, ``(n_layers, n_ff)``.
    """

    groups: NDArray[np.uint32]
    neurons: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Reordering of a tensor's rows, or of the pieces of each row.

    Attributes:
        n_rows: Number of rows.
        rows: Old row at each new place; None if the rows stay.
        pieces: Old piece of a row at each new place, all pieces having the same size; None if they
            stay.
        requantized: Type whose blocks the reordering takes apart, so that rows are quantized again;
            None if the bytes of each piece stay.
    """

    n_rows: int
    rows: NDArray[np.intp] | None
    pieces: NDArray[np.intp] | None
    requantized: GGMLQuantizationType | None = None


def order_by(blocks: Blocks, scores: Scores) -> Order:
    """Return the order with the most important units first.

    Units that can only move together have the mean importance of all of them.

    Raises:
        ConfigError: The scores are of another model.
    """
    _check_shape(blocks, scores.groups, scores.neurons)
    return Order(
        _descending(scores.groups, blocks.group_granule),
        _descending(scores.neurons, blocks.granule),
    )


def inverse_of(order: Order) -> Order:
    """Return the order that undoes another."""
    return Order(
        np.argsort(order.groups, axis=1).astype(np.uint32),
        np.argsort(order.neurons, axis=1).astype(np.uint32),
    )


def check_order(blocks: Blocks, order: Order) -> None:
    """Refuse an order that is no permutation, or that separates units that can only move together.

    Raises:
        ConfigError: The order is refused.
    """
    _check_shape(blocks, order.groups, order.neurons)
    for units, granule in ((order.groups, blocks.group_granule), (order.neurons, blocks.granule)):
        ordered = np.arange(units.shape[1], dtype=np.uint32)
        together = units.reshape(len(units), -1, granule)
        is_order = (np.sort(units, axis=1) == ordered).all()
        is_together = (together == together[..., :1] + ordered[:granule]).all()
        if not is_order or not is_together or (together[..., 0] % granule).any():
            raise ConfigError("the order of a layer's units is impossible")


def move_of(blocks: Blocks, order: Order, name: str, tensor: GGUFTensor) -> Move | None:
    """Return how a tensor is reordered, or None if it stays unchanged."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, matrix, is_bias = int(match[1]), match[2], match[3] == "bias"
    if matrix == "attn_q":
        rows, pieces = _spread(order.groups[layer], blocks.group_width), None
    elif matrix in ("attn_k", "attn_v"):
        rows, pieces = _spread(order.groups[layer], blocks.head_dim), None
    elif matrix in ("ffn_gate", "ffn_up"):
        rows, pieces = order.neurons[layer].astype(np.intp), None
    elif matrix == "attn_output" and not is_bias:
        rows, pieces = None, _granules(order.groups[layer], blocks.group_granule)
    elif matrix == "ffn_down" and not is_bias:
        rows, pieces = None, _granules(order.neurons[layer], blocks.granule)
    else:
        return None
    is_apart = matrix == "ffn_down" and not is_bias and tensor.block_columns > blocks.granule
    n_rows = tensor.n_columns if is_bias else tensor.n_rows
    return Move(n_rows, rows, pieces, tensor.type if is_apart else None)


def moved(content: Bytes, move: Move) -> Iterator[Bytes]:
    """Yield the reordered bytes of a tensor, a chunk of rows at a time."""
    old = content.reshape(move.n_rows, -1)
    n_at_once = max(1, _CHUNK_BYTES // old.shape[1])
    for first in range(0, move.n_rows, n_at_once):
        here = slice(first, first + n_at_once)
        rows = old[here] if move.rows is None else old[move.rows[here]]
        if move.requantized is not None:
            rows = _requantized(rows, move.pieces, move.requantized)
        elif move.pieces is not None:
            rows = _in_other_order(rows, move.pieces)
        yield rows.reshape(-1)


# -- inside --------------------------------------------------------------------------------------


def _check_shape(blocks: Blocks, groups: NDArray[np.generic], neurons: NDArray[np.generic]) -> None:
    expected = (blocks.n_layers, blocks.n_groups), (blocks.n_layers, blocks.n_ff)
    if (groups.shape, neurons.shape) != expected:
        raise ConfigError(
            f"found scores or an order of {groups.shape} groups and {neurons.shape} neurons, "
            f"expected {expected[0]} and {expected[1]}: they are for another model"
        )


def _descending(scores: NDArray[np.float64], granule: int) -> NDArray[np.uint32]:
    together = scores.reshape(len(scores), -1, granule).mean(axis=2)
    order = np.argsort(-together, axis=1, kind="stable")
    units = order[..., None] * granule + np.arange(granule)
    return units.reshape(scores.shape).astype(np.uint32)


def _spread(units: NDArray[np.uint32], width: int) -> NDArray[np.intp]:
    """Return the rows of units that have ``width`` rows each."""
    return (units[:, None].astype(np.intp) * width + np.arange(width)).reshape(-1)


def _granules(units: NDArray[np.uint32], granule: int) -> NDArray[np.intp]:
    """Return the order of granules, the groups of units that move together."""
    return units[::granule].astype(np.intp) // granule


def _in_other_order(rows: Bytes, pieces: NDArray[np.intp]) -> Bytes:
    n_bytes = rows.shape[1] // len(pieces)
    wholes = rows.view({2: "u2", 4: "u4"}.get(n_bytes, f"V{n_bytes}"))
    return wholes.take(pieces, axis=1).view(np.uint8)


def _requantized(
    rows: Bytes, pieces: NDArray[np.intp] | None, type_: GGMLQuantizationType
) -> NDArray[np.uint8]:
    from gguf import quants  # takes memory that apps with prepared models need not spend

    return np.asarray(quants.quantize(quants.dequantize(rows, type_)[:, pieces], type_))
