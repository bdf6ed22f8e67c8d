"""Header of the channel file: model, operands, thresholds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.calibration import SPARSITIES, Calibration, channel_order
from llmaas_plugins.flash_weights.channel_layout import Group, OperandKey, groups_of, key_of
from llmaas_plugins.flash_weights.container import ContainerHeader, Value
from llmaas_plugins.flash_weights.container_file import Kind

__all__ = [
    "CHANNEL_FILE",
    "MODEL",
    "MOST_GROUP_LAYERS",
    "Contents",
    "Distilled",
    "contents_of",
    "distilled_in",
    "group_order",
    "header_of",
    "is_permutation",
]

CHANNEL_FILE = Kind("channel file", "llmaas-channels", 2, "llmaas flash pack --sparse")
MOST_GROUP_LAYERS = 64
MODEL = "llmaas.model"

_FORMAT, _GROUP_LAYERS = "llmaas.format", "llmaas.channels.group_layers"
_LAYERS, _FAMILIES = "llmaas.channels.layers", "llmaas.channels.families"
_QUANTILES, _ACTIVITY = "llmaas.channels.quantiles", "llmaas.channels.activity"
_BITS = "llmaas.channels.bits"
_DISTILLED, _TOKENS = "llmaas.channels.distilled", "llmaas.channels.distilled_tokens"
_SPARSITIES = "llmaas.channels.distilled_sparsities"

_T = TypeVar("_T", int, float, str)
Quantiles = Mapping[OperandKey, NDArray[np.float32]]
"""Quantiles of the magnitudes that each operand reads, at ``SPARSITIES``."""


class Distilled(NamedTuple):
    """How the matrices of a channel file were distilled.

    Attributes:
        digest: Digest of the matrices, 32 hexadecimal digits.
        n_tokens: Tokens that they were trained on.
        sparsities: Least and largest sparsity in training.
    """

    digest: str
    n_tokens: int
    sparsities: tuple[float, float]

    def __str__(self) -> str:
        """Describe the training in a few words."""
        least, most = (f"{100 * each:.0f}" for each in self.sparsities)
        share = f"{most} %" if least == most else f"{least} to {most} %"
        return f"distilled on {self.n_tokens:,} tokens at {share} sparsity"


class Contents(NamedTuple):
    """Contents of a channel file.

    Attributes:
        group_layers: Layers of a group.
        groups: Groups in file order.
        quantiles: Quantiles of each operand.
        distilled: How the matrices were distilled; None if they are the model's.
    """

    group_layers: int
    groups: list[Group]
    quantiles: Quantiles
    distilled: Distilled | None


def header_of(
    model: str,
    groups: Sequence[Group],
    group_layers: int,
    calibration: Calibration,
    distilled: Distilled | None = None,
) -> ContainerHeader:
    """Return the header for a file.

    Raises:
        ValueError: The calibration does not match the operands.
    """
    quantiles: dict[OperandKey, NDArray[np.float32]] = {}
    hashed = hashlib.blake2b(digest_size=16)
    for group in groups:
        for operand in group.operands:
            quantiles[key_of(operand)] = calibration[operand].quantiles
            if not _are_rising(calibration[operand].quantiles):
                raise ValueError(f"{key_of(operand)} has quantiles that are not ascending")
        order = group_order(group, calibration)
        if not is_permutation(order, group.n_channels):
            raise ValueError(f"{group.name} was calibrated with other channels")
        hashed.update(order.tobytes())
    contents = Contents(group_layers, list(groups), quantiles, distilled)
    return _header(model, contents, hashed.hexdigest())


def group_order(group: Group, calibration: Calibration) -> NDArray[np.int32]:
    """Return the channel of each of a group's records."""
    return channel_order([calibration[operand] for operand in group.operands])


def contents_of(header: ContainerHeader, tensors: Mapping[str, TensorInfo]) -> Contents:
    """Return the contents of a file with this header.

    Raises:
        ValueError: The header does not belong to a channel file of such a model.
    """
    fields = header.fields
    group_layers, quantiles = fields.get(_GROUP_LAYERS), _quantiles_in(fields)
    if not isinstance(group_layers, int) or not 1 <= group_layers <= MOST_GROUP_LAYERS:
        raise ValueError(f"its groups have {group_layers} layers")
    groups = groups_of(quantiles, tensors, group_layers)
    if {key_of(one) for group in groups for one in group.operands} != quantiles.keys():
        raise ValueError("its operands differ from the model's")
    model, activity = str(fields.get(MODEL)), str(fields.get(_ACTIVITY))
    contents = Contents(group_layers, groups, quantiles, distilled_in(fields))
    if header != _header(model, contents, activity):
        raise ValueError("its tensors differ from the model's")
    return contents


def _header(model: str, contents: Contents, activity: str) -> ContainerHeader:
    group_layers, groups, quantiles, distilled = contents
    keys = [key_of(operand) for group in groups for operand in group.operands]
    pieces = itertools.chain(*(pieces for group in groups for pieces in group.pieces))
    fields: dict[str, Value] = {
        _FORMAT: CHANNEL_FILE.version,
        MODEL: model,
        _GROUP_LAYERS: group_layers,
        _LAYERS: tuple(layer for layer, _ in keys),
        _FAMILIES: tuple(family for _, family in keys),
        _QUANTILES: tuple(np.concatenate([quantiles[key] for key in keys]).tolist()),
        _ACTIVITY: activity,
        _BITS: tuple(piece.n_bits for piece in pieces),
    }
    if distilled is not None:
        fields |= {
            _DISTILLED: distilled.digest,
            _TOKENS: distilled.n_tokens,
            _SPARSITIES: tuple(np.float32(each).item() for each in distilled.sparsities),
        }
    parts = itertools.chain(*(group.parts for group in groups))
    return ContainerHeader(CHANNEL_FILE.architecture, fields, tuple(parts))


def distilled_in(fields: Mapping[str, Value]) -> Distilled | None:
    """Return how a file's matrices were distilled; None if they are the model's.

    Raises:
        ValueError: The record is incomplete.
    """
    if _DISTILLED not in fields:
        return None
    digest, n_tokens = fields[_DISTILLED], fields.get(_TOKENS)
    sparsities = _array(fields.get(_SPARSITIES), float)
    if not isinstance(digest, str) or not isinstance(n_tokens, int) or len(sparsities) != 2:
        raise ValueError("its record of the distillation is incomplete")
    return Distilled(digest, n_tokens, (sparsities[0], sparsities[1]))


def _quantiles_in(fields: Mapping[str, Value]) -> Quantiles:
    layers, families = _array(fields.get(_LAYERS), int), _array(fields.get(_FAMILIES), str)
    values = _array(fields.get(_QUANTILES), float)
    if len(layers) != len(families) or len(values) != len(layers) * len(SPARSITIES):
        raise ValueError("its list of operands is missing or incomplete")
    rows = np.asarray(values, np.float32).reshape(-1, len(SPARSITIES))
    if not all(map(_are_rising, rows)):
        raise ValueError("its thresholds are not ascending")
    return dict(zip(zip(layers, families, strict=True), rows, strict=True))


def _array(value: Value | None, kind: type[_T]) -> list[_T]:
    """Return an array's values of this type; an empty list if the value is no array."""
    return [one for one in value if isinstance(one, kind)] if isinstance(value, tuple) else []


def _are_rising(quantiles: NDArray[np.float32]) -> bool:
    is_usable = quantiles.shape == (len(SPARSITIES),) and np.isfinite(quantiles).all()
    return bool(is_usable and quantiles[0] >= 0 and (np.diff(quantiles) >= 0).all())


def is_permutation(order: NDArray[np.int32], n: int) -> bool:
    """Return whether ``order`` has each of 0 to n - 1 once."""
    return order.shape == (n,) and bool((np.sort(order) == np.arange(n)).all())
