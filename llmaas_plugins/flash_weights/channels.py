"""Channel file: a model's matrices by columns, so that a token reads only those it needs.

The file is a GGUF of an architecture that stock llama.cpp does not load. A channel is one value of
an activation, with the column of each matrix that it is multiplied by. A record holds a channel's
columns in a group of layers, one after the other. Records are sorted by how busy their channels
are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, FileStamp, StoreError, TensorInfo
from llmaas_plugins.flash_weights.calibration import Calibration
from llmaas_plugins.flash_weights.channel_header import (
    CHANNEL_FILE,
    MODEL,
    MOST_GROUP_LAYERS,
    Contents,
    Distilled,
    contents_of,
    group_order,
    header_of,
    is_permutation,
)
from llmaas_plugins.flash_weights.channel_layout import (
    Group,
    OperandKey,
    Piece,
    groups_of,
    key_of,
)
from llmaas_plugins.flash_weights.columns import Scales, pack_columns
from llmaas_plugins.flash_weights.container_file import Bytes, ContainerFile
from llmaas_plugins.flash_weights.container_writer import Step, write_container
from llmaas_plugins.flash_weights.model_weights import ModelWeights, digest_of
from llmaas_plugins.flash_weights.operands import Operand
from llmaas_plugins.flash_weights.shares import Share, at_sparsity

__all__ = [
    "CHANNEL_FILE",
    "ChannelFile",
    "Channels",
    "Distillation",
    "channel_path",
    "open_channels",
    "open_scales",
    "write_channels",
]


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of an activation in the file.

    Attributes:
        operand: Operand that the channels belong to.
        group: Key of the records with these channels; other layers may share it.
        order: Channel of each record.
        first: Offset in the file of this layer's bytes in the first record.
        stride: Bytes from one record to the next.
        n_bytes: Bytes of this layer in a record.
        pieces: Matrices of the layer, in record order.
        thresholds: Magnitude below which values are left out at each of ``SPARSITIES``.
        shares: Share of the values below these thresholds.
    """

    operand: Operand
    group: tuple[int, str]
    order: NDArray[np.int32]
    first: int
    stride: int
    n_bytes: int
    pieces: tuple[Piece, ...]
    thresholds: NDArray[np.float32]
    shares: Share

    def threshold(self, sparsity: float) -> float:
        """Return the magnitude below which values are left out, at a sparsity from 0 to 0.95."""
        return at_sparsity(self.thresholds, sparsity)

    def share(self, sparsity: float) -> float:
        """Return the share of the values that is left out, at a sparsity from 0 to 0.95."""
        return at_sparsity(self.shares, sparsity)


class ChannelFile(NamedTuple):
    """Channel file of a model.

    Attributes:
        path: Path of the file.
        stamp: State of the file when it was read.
        group_layers: Number of layers that share records.
        operands: Channels by layer and family.
        distilled: How the matrices were distilled; None if they are the model's.
    """

    path: Path
    stamp: FileStamp
    group_layers: int
    operands: dict[OperandKey, Channels]
    distilled: Distilled | None


class Distillation(NamedTuple):
    """Distilled matrices for a channel file.

    Attributes:
        about: How they were distilled.
        read: Function of a matrix's name that returns its type and shape, and its bytes.
    """

    about: Distilled
    read: Callable[[str], tuple[TensorInfo, Bytes]]


def channel_path(model: str | os.PathLike[str]) -> Path:
    """Return the path of a model's channel file, which is beside the model."""
    return Path(model).with_suffix(".channels")


def write_channels(  # noqa: PLR0913 -- model, target, and what is written
    model: Path,
    path: Path,
    tensors: Mapping[str, TensorInfo],
    calibration: Calibration,
    *,
    group_layers: int = 1,
    distillation: Distillation | None = None,
) -> Iterator[int]:
    """Write the channel file of a model, replacing an existing one.

    A run that was stopped is continued by a call with the same arguments.

    Args:
        model: Path of the model.
        path: Path of the channel file.
        tensors: Tensors of the model.
        calibration: Calibration of the operands to write.
        group_layers: Consecutive layers whose channels are read at once.
        distillation: Matrices to write instead of the model's; None writes the model's.

    Yields:
        Bytes of the model that are done: twice all of them, to write and to read back.

    Raises:
        ConfigError: The model has no such operands.
        StoreError: A file cannot be read or written.
    """
    if not 1 <= group_layers <= MOST_GROUP_LAYERS:
        raise ConfigError(f"groups have {group_layers} layers, expected 1 to {MOST_GROUP_LAYERS}.")
    groups = groups_of({key_of(operand) for operand in calibration}, tensors, group_layers)
    if not groups:
        raise ConfigError(
            f"{model} has no matrices whose channels could be read one by one. Mixtures of experts "
            "and models with other matrix names than Llama's are not supported."
        )
    with ModelWeights(model) as weights:
        about, read = distillation or (None, lambda name: (tensors[name], weights.read(name)))
        header = header_of(weights.digest, groups, group_layers, calibration, about)
        steps = (_step(group, read, tensors, calibration) for group in groups)
        yield from write_container(path, header, weights.unchanged(steps))


def open_channels(
    path: Path,
    model: str | os.PathLike[str],
    tensors: Mapping[str, TensorInfo],
    digest: str | None = None,
) -> ChannelFile:
    """Return a model's channel file; read and check all of it except records and scales.

    Args:
        path: Path of the channel file.
        model: Path of the model.
        tensors: Tensors of the model.
        digest: Digest of the model, needed if its file may have been replaced since loading.

    Raises:
        ConfigError: The channel file is of another model.
        StoreError: The file is no channel file, or is damaged.
    """
    with ContainerFile(path, CHANNEL_FILE) as file:
        if file.header.fields.get(MODEL) != (digest or digest_of(model)):
            raise ConfigError(
                f"{path} cannot be used: it was made from another model file, or the model file "
                f"has changed since, or it was made by an earlier version. Run "
                f"`{CHANNEL_FILE.command} {model}` again, or remove it."
            )
        try:
            contents = contents_of(file.header, tensors)
        except ValueError as error:
            raise file.damaged(error) from error
        found = itertools.chain(*(_read_group(file, group, contents) for group in contents.groups))
        operands = {key_of(one.operand): one for one in found}
        return ChannelFile(path, file.stamp, contents.group_layers, operands, contents.distilled)


@contextlib.contextmanager
def open_scales(file: ChannelFile) -> Iterator[Callable[[Piece], Scales]]:
    """Open a reader of one matrix's scales at a time, because all scales together are large.

    Raises:
        StoreError: The file was replaced, or it is damaged, or later the scales that are read.
    """
    with ContainerFile(file.path, CHANNEL_FILE) as content:
        if content.stamp != file.stamp:
            raise StoreError(
                f"{file.path} was replaced or changed while it was opened; load the model again."
            )
        yield functools.partial(_read_scales, content)


# -- writing -------------------------------------------------------------------------------------


def _step(
    group: Group,
    read: Callable[[str], tuple[TensorInfo, Bytes]],
    tensors: Mapping[str, TensorInfo],
    calibration: Calibration,
) -> Step:
    def make() -> list[NDArray[np.generic]]:
        order = group_order(group, calibration)
        records = np.empty((group.n_channels, sum(group.layer_bytes)), np.uint8)
        scales: list[NDArray[np.generic]] = []
        at = 0
        for piece in itertools.chain(*group.pieces):
            room = records[:, at : at + piece.n_bytes]
            packed = pack_columns(*read(piece.name), order, room)
            scales += [each for each in packed if each is not None]
            at += piece.n_bytes
        return [order, records, *scales]

    n_bytes = sum(tensors[piece.name].n_bytes for piece in itertools.chain(*group.pieces))
    return Step(tuple(part.name for part in group.parts), make, n_bytes)


# -- reading -------------------------------------------------------------------------------------


def _read_group(file: ContainerFile, group: Group, contents: Contents) -> list[Channels]:
    order = file.read(f"order.{group.name}").view(np.int32)
    if not is_permutation(order, group.n_channels):
        raise file.damaged(f"the order of {group.name} is not a permutation")
    first, found = file.header.places[f"group.{group.name}"], []
    for operand, pieces, n_bytes in zip(
        group.operands, group.pieces, group.layer_bytes, strict=True
    ):
        key = key_of(operand)
        found.append(
            Channels(
                operand, (group.index, operand.family), order, first, sum(group.layer_bytes),
                n_bytes, pieces, contents.thresholds[key], contents.shares[key],
            )
        )  # fmt: skip
        first += n_bytes
    return found


def _read_scales(file: ContainerFile, piece: Piece) -> Scales:
    def read(name: str) -> NDArray[np.float16]:
        content = file.read(f"{name}.{piece.name}")
        return content.view(np.float16).reshape(-1, piece.n_padded_rows)

    return Scales(read("scales"), read("mins") if piece.has_mins else None)
