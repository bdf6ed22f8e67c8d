"""What a model needs memory for, from what its file says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from llmaas_hooks import StoreError, TensorInfo
from llmaas_plugins.flash_weights.channel_layout import (
    Group,
    channel_operands,
    groups_of,
    key_of,
)
from llmaas_plugins.flash_weights.locality import typical_means
from llmaas_plugins.flash_weights.packed import streamable

__all__ = ["ChannelBytes", "Metadata", "ModelSizes", "metadata_of", "sizes_of"]

_CELL_BYTES = 2
_BATCH = 512
"""Tokens that llama.cpp's buffers are made for, unless the context is shorter."""
_LLAMA_BYTES, _TOKEN_BYTES = 8 << 20, 400
"""What a ``Llama`` was seen to take beside weights, cells and buffers, and each token it knows."""
_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")
_KEYS = re.compile(r"blk\.\d+\.attn_[kv]\.weight")
_MERGED = re.compile(r"blk\.\d+\.attn_qkv\.weight")


class Metadata(NamedTuple):
    """Of a model.

    Attributes:
        n_heads: Of attention; the most that a layer has.
        expert_share: Of a mixture's experts, how many a token uses; 1: it is no mixture.
    """

    n_heads: int
    expert_share: float


@dataclass(frozen=True, slots=True, eq=False)
class ChannelBytes:
    """An activation whose channels are read one by one, in layers that are all alike.

    Attributes:
        family: Of matrices.
        n_layers: How many layers.
        n_channels: Of each.
        n_bytes: Of a channel in a layer.
        stride: From one to the next in the channel file.
        means: Mean magnitude of each channel, busiest first.
    """

    family: str
    n_layers: int
    n_channels: int
    n_bytes: int
    stride: int
    means: NDArray[np.float64]

    @property
    def layer_bytes(self) -> int:
        """Of all its channels in a layer."""
        return self.n_channels * self.n_bytes

    @property
    def all_bytes(self) -> int:
        """In all layers."""
        return self.n_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model with a context.

    Attributes:
        n_layers: Of the model.
        streamed: Of matrices that are kept, or read for each token.
        experts: Of them, those of experts.
        expert_share: Of the experts, how many a token uses.
        least_experts: Of experts that stay in memory in any case.
        resident: Of all other weights, except embeddings: their rows are read one by one.
        largest: Of the largest tensor, which llama.cpp reads as a whole when it loads the model.
        kv: Of the KV cache.
        buffers: Of llama.cpp's for a batch.
        app: Of a ``Llama`` beside all these: its vocabulary, graphs, templates.
        channels: Of activations, in the sparse mode.
        dense: Of matrices without channels, which the sparse mode treats as the exact one does;
            experts are not among them.
        scales: Of matrices with channels, and mins; the sparse mode has them in memory.
    """

    n_layers: int
    streamed: int
    experts: int
    expert_share: float
    least_experts: int
    resident: int
    largest: int
    kv: int
    buffers: int
    app: int
    channels: tuple[ChannelBytes, ...]
    dense: int
    scales: int

    @property
    def used(self) -> float:
        """Streamed bytes that a token computes with in the exact mode."""
        return self.streamed - self.experts * (1 - self.expert_share)

    @property
    def in_channels(self) -> int:
        """Bytes of all channels."""
        return sum(one.all_bytes for one in self.channels)


def metadata_of(model: Path) -> Metadata:
    """What its tensors do not say.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        fields = GGUFReader(model).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise StoreError(f"cannot read {model}: {error}.") from error

    def number(name: str) -> int:
        found = [field.contents() for key, field in fields.items() if key.endswith(f".{name}")]
        return int(np.max(found[0])) if found else 0

    n_experts = number("expert_count")
    return Metadata(
        n_heads=number("attention.head_count"),
        expert_share=number("expert_used_count") / n_experts if n_experts else 1.0,
    )


def sizes_of(
    tensors: Mapping[str, TensorInfo],
    metadata: Metadata,
    n_ctx: int,
    group_layers: int = 1,
    n_batch: int = _BATCH,
) -> ModelSizes:
    """What a model needs.

    Args:
        tensors: What it has.
        metadata: Likewise.
        n_ctx: Tokens of the context, with cells of 16 bits.
        group_layers: Layers whose channels are side by side in the channel file.
        n_batch: Tokens that are computed together at most (``n_ubatch``).
    """
    streamed = streamable(tensors)
    keys = {key_of(operand) for operand in channel_operands(tensors)}
    groups = groups_of(keys, tensors, group_layers)
    pieces = [piece for group in groups for found in group.pieces for piece in found]
    experts = [info.n_bytes for name, info in streamed.items() if _EXPERTS.fullmatch(name)]
    with_channels = {piece.name for piece in pieces}
    n_streamed = sum(info.n_bytes for info in streamed.values())
    return ModelSizes(
        n_layers=len({name.split(".")[1] for name in tensors if name.startswith("blk.")}),
        streamed=n_streamed,
        experts=sum(experts),
        expert_share=metadata.expert_share,
        least_experts=max(experts, default=0),
        resident=sum(info.n_bytes for info in tensors.values() if not info.is_matrix),
        largest=max((info.n_bytes for info in tensors.values()), default=0),
        kv=n_ctx * _CELL_BYTES * _kv_values(tensors),
        buffers=_buffers(tensors, metadata.n_heads, n_ctx, min(n_batch, n_ctx)),
        app=_LLAMA_BYTES + _TOKEN_BYTES * _embeddings(tensors)[1],
        channels=_channels(groups),
        dense=n_streamed - sum(experts) - sum(tensors[name].n_bytes for name in with_channels),
        scales=sum(part.n_bytes for group in groups for part in group.scales),
    )


def _channels(groups: Sequence[Group]) -> tuple[ChannelBytes, ...]:
    """Layers that are alike together."""
    found = Counter(
        (operand.family, operand.n_channels, n_bytes, sum(group.layer_bytes))
        for group in groups
        for operand, n_bytes in zip(group.operands, group.layer_bytes, strict=True)
    )
    return tuple(
        ChannelBytes(
            family, n_layers, n_channels, n_bytes, stride, typical_means(family, n_channels)
        )
        for (family, n_channels, n_bytes, stride), n_layers in found.items()
    )


def _kv_values(tensors: Mapping[str, TensorInfo]) -> int:
    """Of a token."""
    apart = sum(info.shape[1] for name, info in tensors.items() if _KEYS.fullmatch(name))
    merged = (info.shape for name, info in tensors.items() if _MERGED.fullmatch(name))
    return apart + sum(rows - columns for columns, rows, _ in merged)


def _embeddings(tensors: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Their width, and how many there are."""
    info = tensors.get("token_embd.weight")
    return (info.shape[0], info.shape[1]) if info else (0, 0)


def _buffers(tensors: Mapping[str, TensorInfo], n_heads: int, n_ctx: int, n_batch: int) -> int:
    """Of the largest of attention, the feed-forward block and logits; as it was seen to be."""
    width, n_vocab = _embeddings(tensors)
    ups = [info.shape[1] for name, info in tensors.items() if ".ffn_up" in name]
    attention, forward = n_heads * n_ctx + 6 * width, 3 * max(ups, default=0) + 4 * width
    largest = max(attention, forward, n_vocab + 2 * width)
    return 9 * n_batch * (n_ctx + largest) // 2  # 4 bytes each, and an eighth more
