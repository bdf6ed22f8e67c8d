"""Set up the sparse mode, where a token uses only the largest values of each activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from llmaas_hooks import (
    ChannelColumns,
    ChannelOperand,
    ConfigError,
    FileWeights,
    ModelLoad,
    TensorInfo,
)
from llmaas_plugins.flash_weights.channel_layout import Piece, predictors_of
from llmaas_plugins.flash_weights.channels import (
    ChannelFile,
    Channels,
    channel_path,
    open_channels,
    open_scales,
)
from llmaas_plugins.flash_weights.columns import Scales
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.operands import FAMILIES
from llmaas_plugins.model.digest import begin_digest

__all__ = ["add_channels", "model_channels"]

_CACHES: dict[str, Literal["streamed", "busiest", "recent"]] = {
    "streamed": "streamed",
    "busiest": "busiest",
    "shared": "recent",
    "layer": "recent",
}


def model_channels(load: ModelLoad, tensors: Mapping[str, TensorInfo]) -> ChannelFile:
    """Open the channel file of a model that is loaded, or about to be.

    Raises:
        ConfigError: The model has no channel file, or has one of another model.
        StoreError: The channel file is damaged, or the model file was changed since loading.
    """
    path = channel_path(load.path)
    if not path.exists():
        raise ConfigError(
            f"the sparse mode needs {path}, which does not exist. Run `llmaas flash pack --sparse "
            f"{load.path}`, or set mode to exact."
        )
    return open_channels(path, load.path, tensors, begin_digest(load.files).get())


def add_channels(weights: FileWeights, file: ChannelFile, config: FlashWeightsConfig) -> None:
    """Make tokens use only their active channels, from the next batch on.

    Raises:
        ConfigError: The file does not suit the model or the configuration.
        StoreError: The file was replaced, or its scales are damaged.
    """
    if config.cache == "streamed" and file.group_layers > 1:
        raise ConfigError(
            f"{file.path} stores columns of {file.group_layers} layers side by side, but the "
            "cache `streamed` reads whole layers. Run `llmaas flash pack --sparse` without "
            "--group-layers, or choose another cache."
        )
    operands = [channels.operand for channels in file.operands.values()]
    predictors = predictors_of(operands, file.group_layers) if config.preload else {}
    with open_scales(file) as read_scales:
        for number, channels in enumerate(file.operands.values()):
            # Build one operand at a time, because the engine copies its scales.
            operand = _operand(channels, read_scales, config)
            operand = replace(operand, predictor=predictors.get(number))
            weights.add_operand(str(file.path), file.stamp, operand)


def _operand(
    channels: Channels, read_scales: Callable[[Piece], Scales], config: FlashWeightsConfig
) -> ChannelOperand:
    layer, families = channels.operand.layer, list(FAMILIES)
    family = families.index(channels.operand.family)
    is_exact, share = config.selection == "top_k", channels.share(config.sparsity)
    return ChannelOperand(
        pool=layer * len(families) + family if config.cache == "layer" else family,
        n_bytes=channels.n_bytes,
        offset=channels.first,
        stride=channels.stride,
        order=channels.order.astype("uint32"),
        cache=_CACHES[config.cache],
        threshold=0.0 if is_exact else channels.threshold(config.sparsity),
        n_top=round(len(channels.order) * (1 - share)) if is_exact else 0,
        columns=tuple(
            ChannelColumns(piece.name, piece.n_bits, piece.offset, *read_scales(piece))
            for piece in channels.pieces
        ),
    )
