"""Packed files and channel files of small models."""

from __future__ import annotations

from flash_models import calibration_of, tensors_of, write_model
from gguf import GGMLQuantizationType as Type

from llmaas_plugins.flash_weights.channels import (
    CHANNEL_FILE,
    channel_path,
    open_channels,
    open_scales,
    write_channels,
)
from llmaas_plugins.flash_weights.packed import PACKED_FILE, packed_path, write_packed


def channels_of(tmp_path, kind="Q4_0", group_layers=1, **model):
    """Return a model, its tensors, and its channel file."""
    path = write_model(tmp_path / "model.gguf", Type[kind], **model)
    tensors = tensors_of(path)
    calibration = calibration_of(tensors)
    done = write_channels(path, channel_path(path), tensors, calibration, group_layers=group_layers)
    assert sum(done) == 2 * sum(
        info.n_bytes for name, info in tensors.items() if name.startswith("blk.")
    )
    return path, tensors, open_channels(channel_path(path), path, tensors)


def scales_of(file):
    """Return the scales by matrix names."""
    pieces = [piece for channels in file.operands.values() for piece in channels.pieces]
    with open_scales(file) as read:
        return {piece.name: read(piece) for piece in pieces}


class Packed:
    """How to write and check a packed file."""

    kind, place = PACKED_FILE, staticmethod(packed_path)

    @staticmethod
    def write(model):
        return write_packed(model, packed_path(model), tensors_of(model), lambda _, plain: ~plain)


class Channelled:
    """How to write and check a channel file."""

    kind, place = CHANNEL_FILE, staticmethod(channel_path)

    @staticmethod
    def write(model, seed=0, **options):
        tensors = tensors_of(model)
        calibration = calibration_of(tensors, seed)
        return write_channels(model, channel_path(model), tensors, calibration, **options)


def partial_of(path):
    return path.with_name(f"{path.name}.partial")


def stopped(writing, n):
    """Stop the writing after ``n`` tensors or groups of them."""
    for _ in range(n):
        next(writing)
    writing.close()
