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
_SHARES, _FORESEEN = "llmaas.channels.shares", "llmaas.channels.foreseen"
_MAGNITUDES = "llmaas.channels.magnitudes"
_N_RANKS = 33
"""Ranks of channels whose mean magnitudes are stored."""
_BITS = "llmaas.channels.bits"
_DISTILLED, _TOKENS = "llmaas.channels.distilled", "llmaas.channels.distilled_tokens"
_SPARSITIES = "llmaas.channels.distilled_sparsities"

_LEAST_MEAN = 1e-30

_T = TypeVar("_T", int, float, str)
ByOperand = Mapping[OperandKey, NDArray[np.float32]]
"""Numbers for each operand, mostly one at each of ``SPARSITIES``."""


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
        magnitudes: Mean magnitudes of channels at equally distant ranks, the busiest first, as
            multiples of their mean; None in files of earlier versions.
        foreseen: Share of the values above the thresholds that preloading foresees; None if it was
            not measured.
    """

    group_layers: int
    groups: list[Group]
    thresholds: ByOperand
    shares: ByOperand
    distilled: Distilled | None
    magnitudes: ByOperand | None
    foreseen: ByOperand | None


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
    magnitudes: dict[OperandKey, NDArray[np.float32]] = {}
    foreseen: dict[OperandKey, NDArray[np.float32]] = {}
    hashed = hashlib.blake2b(digest_size=16)
    for group in groups:
        for operand in group.operands:
            key, activity = key_of(operand), calibration[operand]
            thresholds[key], shares[key] = activity.thresholds, activity.share
            magnitudes[key] = _at_ranks(activity.means)
            if activity.foreseen is not None:
                foreseen[key] = activity.foreseen
            if not _are_rising(activity.thresholds):
                raise ValueError(f"{key} has thresholds that are not ascending")
            if not is_share(activity.share):
                raise ValueError(f"{key} has shares that are not ascending from 0 to 0.95")
        order = group_order(group, calibration)
        if not is_permutation(order, group.n_channels):
            raise ValueError(f"{group.name} was calibrated with other channels")
        hashed.update(order.tobytes())
    known = foreseen if len(foreseen) == len(thresholds) else None
    contents = Contents(
        group_layers, list(groups), thresholds, shares, distilled, magnitudes, known
    )
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
    contents = Contents(
        group_layers,
        groups,
        _thresholds_in(fields, keys),
        _shares_in(fields, keys),
        distilled_in(fields),
        _magnitudes_in(fields, keys),
        _foreseen_in(fields, keys),
    )
    if header != _header(model, contents, activity):
        raise ValueError("its tensors differ from the model's")
    return contents


def _header(model: str, contents: Contents, activity: str) -> ContainerHeader:
    group_layers, groups, thresholds, shares, distilled, magnitudes, foreseen = contents
    keys = [key_of(operand) for group in groups for operand in group.operands]
    pieces = itertools.chain(*(pieces for group in groups for pieces in group.pieces))
    fields: dict[str, Value] = {
        _FORMAT: CHANNEL_FILE.version,
        MODEL: model,
        _GROUP_LAYERS: group_layers,
        _LAYERS: tuple(layer for layer, _ in keys),
        _FAMILIES: tuple(family for _, family in keys),
        _THRESHOLDS: _in_a_row(thresholds, keys),
        _ACTIVITY: activity,
        _BITS: tuple(piece.n_bits for piece in pieces),
    }
    if any((shares[key] != equal_share()).any() for key in keys):
        fields[_SHARES] = _in_a_row(shares, keys)
    if magnitudes is not None:
        fields[_MAGNITUDES] = _in_a_row(magnitudes, keys)
    if foreseen is not None:
        fields[_FORESEEN] = _in_a_row(foreseen, keys)
    if distilled is not None:
        fields |= {
            _DISTILLED: distilled.digest,
            _TOKENS: distilled.n_tokens,
            _SPARSITIES: tuple(np.float32(each).item() for each in distilled.sparsities),
        }
    parts = itertools.chain(*(group.parts for group in groups))
    return ContainerHeader(CHANNEL_FILE.architecture, fields, tuple(parts))


def _in_a_row(values: ByOperand, keys: Sequence[OperandKey]) -> tuple[float, ...]:
    return tuple(np.concatenate([values[key] for key in keys]).tolist())


def _at_ranks(means: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return magnitudes of channels at equally distant ranks, as multiples of their mean."""
    ordered = np.sort(means)[::-1] / max(float(means.mean()), _LEAST_MEAN)
    places = (np.arange(_N_RANKS) + 0.5) / _N_RANKS * len(means) - 0.5
    return np.interp(places, np.arange(len(means)), ordered).astype(np.float32)


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


def _thresholds_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> ByOperand:
    found = _rows(fields, _THRESHOLDS, keys, len(SPARSITIES))
    if not all(map(_are_rising, found.values())):
        raise ValueError("its thresholds are not ascending")
    return found


def _shares_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> ByOperand:
    """Return the shares; files without any leave out the same share of each operand."""
    if _SHARES not in fields:
        return {key: equal_share() for key in keys}
    found = _rows(fields, _SHARES, keys, len(SPARSITIES))
    if not all(map(is_share, found.values())):
        raise ValueError("its shares are not ascending from 0 to 0.95")
    return found


def _magnitudes_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> ByOperand | None:
    if _MAGNITUDES not in fields:
        return None
    found = _rows(fields, _MAGNITUDES, keys, _N_RANKS)
    if not all(map(_are_falling, found.values())):
        raise ValueError("its magnitudes are not descending")
    return found


def _foreseen_in(fields: Mapping[str, Value], keys: Sequence[OperandKey]) -> ByOperand | None:
    if _FORESEEN not in fields:
        return None
    found = _rows(fields, _FORESEEN, keys, len(SPARSITIES))
    if not all(((row >= 0) & (row <= 1)).all() for row in found.values()):
        raise ValueError("its foreseen shares are not from 0 to 1")
    return found


def _rows(fields: Mapping[str, Value], name: str, keys: Sequence[OperandKey], n: int) -> ByOperand:
    """Return ``n`` numbers for each operand."""
    values = _array(fields.get(name), float)
    if len(values) != len(keys) * n:
        raise ValueError(f"its {name} are missing or incomplete")
    rows = np.asarray(values, np.float32).reshape(-1, n)
    return dict(zip(keys, rows, strict=True))


def _array(value: Value | None, kind: type[_T]) -> list[_T]:
    """Return an array's values of this type; an empty list if the value is no array."""
    return [one for one in value if isinstance(one, kind)] if isinstance(value, tuple) else []


def _are_rising(thresholds: NDArray[np.float32]) -> bool:
    is_usable = thresholds.shape == (len(SPARSITIES),) and np.isfinite(thresholds).all()
    return bool(is_usable and thresholds[0] >= 0 and (np.diff(thresholds) >= 0).all())


def _are_falling(magnitudes: NDArray[np.float32]) -> bool:
    is_usable = np.isfinite(magnitudes).all() and magnitudes[-1] >= 0
    return bool(is_usable and (np.diff(magnitudes) <= 0).all())


def is_permutation(order: NDArray[np.int32], n: int) -> bool:
    """Return whether ``order`` has each of 0 to n - 1 once."""
    return order.shape == (n,) and bool((np.sort(order) == np.arange(n)).all())
