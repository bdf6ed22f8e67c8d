"""Header of the channel file: model, operands, thresholds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.calibration import Calibration, channel_order
from llmaas_plugins.flash_weights.channel_layout import Group, OperandKey, groups_of, key_of
from llmaas_plugins.flash_weights.container import ContainerHeader, Value
from llmaas_plugins.flash_weights.container_file import Kind
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share, is_share

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
_THRESHOLDS, _ACTIVITY = "llmaas.channels.quantiles", "llmaas.channels.activity"
_SHARES = "llmaas.channels.shares"
_BITS = "llmaas.channels.bits"
_DISTILLED, _TOKENS = "llmaas.channels.distilled", "llmaas.channels.distilled_tokens"
_SPARSITIES = "llmaas.channels.distilled_sparsities"

_T = TypeVar("_T", int, float, str)
BySparsity = Mapping[OperandKey, NDArray[np.float32]]
"""A number for each operand at each of ``SPARSITIES``."""


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
        thresholds: Magnitudes below which values are left out.
        shares: Shares of the values below these thresholds.
        distilled: How the matrices were distilled; None if they are the model's.
    """

    group_layers: int
    groups: list[Group]
    thresholds: BySparsity
    shares: BySparsity
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
    thresholds: dict[OperandKey, NDArray[np.float32]] = {}
    shares: dict[OperandKey, NDArray[np.float32]] = {}
    hashed = hashlib.blake2b(digest_size=16)
    for group in groups:
        for operand in group.operands:
            key, activity = key_of(operand), calibration[operand]
            thresholds[key], shares[key] = activity.thresholds, activity.share
            if not _are_rising(activity.thresholds):
                raise ValueError(f"{key} has thresholds that are not ascending")
            if not is_share(activity.share):
                raise ValueError(f"{key} has shares that are not ascending from 0 to 0.95")
        order = group_order(group, calibration)
        if not is_permutation(order, group.n_channels):
            raise ValueError(f"{group.name} was calibrated with other channels")
        hashed.update(order.tobytes())
    contents = Contents(group_layers, list(groups), thresholds, shares, distilled)
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
    group_layers, keys = fields.get(_GROUP_LAYERS), _keys_in(fields)
    if not isinstance(group_layers, int) or not 1 <= group_layers <= MOST_GROUP_LAYERS:
        raise ValueError(f"its groups have {group_layers} layers")
    groups = groups_of(keys, tensors, group_layers)
    if {key_of(one) for group in groups for one in group.operands} != set(keys):
        raise ValueError("its operands differ from the model's")
    model, activity = str(fields.get(MODEL)), str(fields.get(_ACTIVITY))
    thresholds, shares = _thresholds_in(fields, keys), _shares_in(fields, keys)
    contents = Contents(group_layers, groups, thresholds, shares, distilled_in(fields))
    if header != _header(model, contents, activity):
        raise ValueError("its tensors differ from the model's")
    return contents


def _header(model: str, contents: Contents, activity: str) -> ContainerHeader:
    group_layers, groups, thresholds, shares, distilled = contents
    keys = [key_of(operand) for group in groups for operand in group.operands]
    pieces = itertools.chain(*(pieces for group in groups for pieces in group.pieces))
    fields: dict[str, Value] = {
        _FORMAT: CHANNEL_FILE.version,
        MODEL: model,
        _GROUP_LAYERS: group_layers,
        _LAYERS: tuple(layer for layer, _ in keys),
        _FAMILIES: tuple(family for _, family in keys),
        _THRESHOLDS: tuple(np.concatenate([thresholds[key] for key in keys]).tolist()),
        _ACTIVITY: activity,
        _BITS: tuple(piece.n_bits for piece in pieces),
    }
    if any((shares[key] != equal_share()).any() for key in keys):
        fields[_SHARES] = tuple(np.concatenate([shares[key] for key in keys]).tolist())
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


def _keys_in(fields: Mapping[str, Value]) -> list[OperandKey]:
    layers, families = _array(fields.get(_LAYERS), int), _array(fields.get(_FAMILIES), str)
    if len(layers) != len(families):
        raise ValueError("its list of operands is missing or incomplete")
    return list(zip(layers, families, strict=True))


def _thresholds_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> BySparsity:
    found = _by_sparsity(fields, _THRESHOLDS, keys)
    if not all(map(_are_rising, found.values())):
        raise ValueError("its thresholds are not ascending")
    return found


def _shares_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> BySparsity:
    """Return the shares; files without any leave out the same share of each operand."""
    if _SHARES not in fields:
        return {key: equal_share() for key in keys}
    found = _by_sparsity(fields, _SHARES, keys)
    if not all(map(is_share, found.values())):
        raise ValueError("its shares are not ascending from 0 to 0.95")
    return found


def _by_sparsity(fields: Mapping[str, Value], name: str, keys: Sequence[OperandKey]) -> BySparsity:
    values = _array(fields.get(name), float)
    if len(values) != len(keys) * len(SPARSITIES):
        raise ValueError(f"its {name} are missing or incomplete")
    rows = np.asarray(values, np.float32).reshape(-1, len(SPARSITIES))
    return dict(zip(keys, rows, strict=True))


def _array(value: Value | None, kind: type[_T]) -> list[_T]:
    """Return an array's values of this type; an empty list if the value is no array."""
    return [one for one in value if isinstance(one, kind)] if isinstance(value, tuple) else []


def _are_rising(thresholds: NDArray[np.float32]) -> bool:
    is_usable = thresholds.shape == (len(SPARSITIES),) and np.isfinite(thresholds).all()
    return bool(is_usable and thresholds[0] >= 0 and (np.diff(thresholds) >= 0).all())


def is_permutation(order: NDArray[np.int32], n: int) -> bool:
    """Return whether ``order`` has each of 0 to n - 1 once."""
    return order.shape == (n,) and bool((np.sort(order) == np.arange(n)).all())
