"""Compute a model's memory needs from its file's header."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.channel_layout import (
    Group,
    channel_operands,
    groups_of,
    key_of,
)
from llmaas_plugins.flash_weights.channel_use import ChannelUse, assumed_foreseen, means_of
from llmaas_plugins.flash_weights.packed import streamable
from llmaas_plugins.flash_weights.shares import SPARSITIES, Share, at_sparsity, equal_share
from llmaas_plugins.model.cell_sizes import values_in_cells
from llmaas_plugins.model.gguf_header import read_header

__all__ = [
    "CELL_BYTES",
    "ChannelBytes",
    "Metadata",
    "ModelSizes",
    "metadata_of",
    "sizes_of",
    "whole_bytes",
]

CELL_BYTES = 4.0
"""Bytes of a cell's key value and value value together; each has 16 bits by default."""
_CELLS = 256
"""llama.cpp rounds a context up to a multiple of these cells."""
_BATCH = 512
"""Tokens per batch that llama.cpp's buffers are sized for, unless the context is shorter."""
_LLAMA_BYTES, _TOKEN_BYTES = 8 << 20, 400
"""Measured bytes of a ``Llama`` beside weights, cells and buffers: fixed, and per known token."""
_OUTSIDE_BYTES = 128 << 20
"""Bytes of a process beside resident weights: the interpreter, libraries, a short context."""
_USUAL = 4096
"""Tokens of a context that a budget should leave room for beside a model in memory."""
_INPUT_BYTES = 64
"""Bytes of a token's inputs in compute buffers: positions, cells, choices of experts."""
_WIDE = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")


class Metadata(NamedTuple):
    """Metadata of a model that its tensors do not show.

    Attributes:
        n_heads: Number of attention heads; the maximum over the layers.
        expert_share: Share of a mixture's experts that a token uses; 1 without experts.
        n_used: Number of a mixture's experts that a token uses; 1 without experts.
        has_window: Whether some layers see a window of the context only.
        n_state: Length of the states of recurrent layers; 0 without such layers.
        n_trained: Tokens of the context that the model was trained with; 0 if unknown.
    """

    n_heads: int
    expert_share: float
    n_used: int = 1
    has_window: bool = False
    n_state: int = 0
    n_trained: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ChannelBytes:
    """Size of an activation's channels, which are read one by one, in layers of the same shape.

    Attributes:
        family: Family of the matrices.
        n_layers: Number of layers.
        n_channels: Number of channels of a layer.
        n_bytes: Bytes of one channel in a layer.
        stride: Bytes from one channel to the next in the channel file.
        means: Mean magnitude of each channel, busiest first.
        shares: Share of the values that is left out at each of ``SPARSITIES``.
        foreseen: Share of the active channels that preloading foresees, at the same sparsities.
    """

    family: str
    n_layers: int
    n_channels: int
    n_bytes: int
    stride: int
    means: NDArray[np.float64]
    shares: Share
    foreseen: Share

    def left_out(self, sparsity: float) -> float:
        """Return the share of the values that is left out."""
        return at_sparsity(self.shares, sparsity)

    def foreseen_at(self, sparsity: float) -> float:
        """Return the share of the active channels that preloading foresees."""
        return float(np.interp(sparsity, (0.0, *SPARSITIES), (1.0, *self.foreseen)))

    @property
    def layer_bytes(self) -> int:
        """Bytes of all channels of a layer."""
        return self.n_channels * self.n_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes of all channels of all layers."""
        return self.n_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes in bytes of a model with a context.

    Attributes:
        n_layers: Number of layers.
        streamed: Matrices that are either kept in memory or read for each token.
        experts: The part of ``streamed`` that belongs to experts.
        expert_share: Share of the experts that a token uses.
        least_experts: Least memory for experts.
        resident: All other weights except embeddings, whose rows are read one by one.
        largest: Largest tensor, which llama.cpp reads as a whole when it loads the model.
        kv: KV cache, and the states of recurrent layers.
        buffers: llama.cpp's compute buffers for a batch.
        work: ggml's copy of a product's operand in the type that the product is computed in.
        app: Other memory of a ``Llama``: its vocabulary, graphs, templates.
        channels: Activations with channels, in the sparse mode.
        dense: Matrices without channels, which the sparse mode treats as the exact mode does.
            Experts are not included.
        scales: Scales and mins of matrices with channels; the sparse mode keeps them in memory.
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
    work: int
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
    """Read the metadata of a model file.

    Raises:
        ConfigError: The file is no GGUF file, or is damaged.
        StoreError: The file cannot be read.
    """
    fields = read_header(model).fields

    def number(name: str) -> int:
        found = next((value for key, value in fields.items() if key.endswith(f".{name}")), None)
        if isinstance(found, np.ndarray) and found.size and found.dtype.kind in "iu":
            return int(found.max())
        return found if isinstance(found, int) else 0

    n_experts, n_used = number("expert_count"), number("expert_used_count")
    return Metadata(
        n_heads=number("attention.head_count"),
        expert_share=n_used / n_experts if n_experts else 1.0,
        n_used=max(n_used, 1),
        has_window=number("attention.sliding_window") > 0,
        n_state=number("ssm.state_size"),
        n_trained=number("context_length"),
    )


def sizes_of(  # noqa: PLR0913 -- a file and the settings of a context
    tensors: Mapping[str, TensorInfo],
    metadata: Metadata,
    n_ctx: int,
    group_layers: int = 1,
    n_batch: int = _BATCH,
    *,
    cell_bytes: float = CELL_BYTES,
    is_flash: bool = False,
    uses: Mapping[str, ChannelUse] = MappingProxyType({}),
) -> ModelSizes:
    """Return the memory needs of a model.

    Args:
        tensors: Tensors of the model.
        metadata: Metadata of the model.
        n_ctx: Tokens of the context.
        group_layers: Layers whose channels are side by side in the channel file.
        n_batch: Most tokens that are computed together (``n_ubatch``).
        cell_bytes: Bytes of one key value and one value value together.
        is_flash: Whether attention is computed as flash attention.
        uses: How channels are used, by family; what is missing is assumed.
    """
    streamed = streamable(tensors)
    keys = {key_of(operand) for operand in channel_operands(tensors)}
    groups = groups_of(keys, tensors, group_layers)
    pieces = [piece for group in groups for found in group.pieces for piece in found]
    experts = [info.n_bytes for name, info in streamed.items() if _EXPERTS.fullmatch(name)]
    with_channels = {piece.name for piece in pieces}
    n_streamed = sum(info.n_bytes for info in streamed.values())
    n_values = values_in_cells({name: info.shape for name, info in tensors.items()})
    n_cells = math.ceil(n_ctx / _CELLS) * _CELLS if n_values else 0
    n_attended = 0 if is_flash else metadata.n_heads * n_cells
    return ModelSizes(
        n_layers=len({name.split(".")[1] for name in tensors if name.startswith("blk.")}),
        streamed=n_streamed,
        experts=sum(experts),
        expert_share=metadata.expert_share,
        least_experts=max(experts, default=0),
        resident=sum(info.n_bytes for info in tensors.values() if not info.is_matrix),
        largest=max((info.n_bytes for info in tensors.values()), default=0),
        kv=int(n_cells * cell_bytes / 2 * n_values) + _state_bytes(tensors, metadata),
        buffers=min(n_batch, n_ctx) * _buffer_bytes(tensors, metadata, n_attended, n_cells),
        work=min(n_batch, n_ctx) * _work_bytes(tensors, metadata, n_attended),
        app=_LLAMA_BYTES + _TOKEN_BYTES * _embeddings(tensors)[1],
        channels=_channels(groups, uses),
        dense=n_streamed - sum(experts) - sum(tensors[name].n_bytes for name in with_channels),
        scales=sum(part.n_bytes for group in groups for part in group.scales),
    )


def whole_bytes(tensors: Mapping[str, TensorInfo], metadata: Metadata | None) -> int:
    """Return the bytes that a model needs beside its process if memory holds all weights.

    Args:
        tensors: Tensors of the model.
        metadata: Metadata of the model, if a context of the usual length must fit, too.
    """
    n_bytes = _OUTSIDE_BYTES + sum(info.n_bytes for info in tensors.values())
    if metadata is None:
        return n_bytes
    return n_bytes + sizes_of(tensors, metadata, min(metadata.n_trained or _USUAL, _USUAL)).kv


def _channels(groups: Sequence[Group], uses: Mapping[str, ChannelUse]) -> tuple[ChannelBytes, ...]:
    """Group layers of the same shape."""
    found = Counter(
        (operand.family, operand.n_channels, n_bytes, sum(group.layer_bytes))
        for group in groups
        for operand, n_bytes in zip(group.operands, group.layer_bytes, strict=True)
    )
    return tuple(
        ChannelBytes(
            family, n_layers, n_channels, n_bytes, stride,
            *_used(uses.get(family), family, n_channels),
        )
        for (family, n_channels, n_bytes, stride), n_layers in found.items()
    )  # fmt: skip


def _used(
    use: ChannelUse | None, family: str, n_channels: int
) -> tuple[NDArray[np.float64], Share, Share]:
    """Return means, shares and foreseen shares of a family, measured or assumed."""
    foreseen = use.foreseen if use else None
    return (
        means_of(use, family, n_channels),
        use.share if use else equal_share(),
        assumed_foreseen(family) if foreseen is None else foreseen,
    )


def _embeddings(tensors: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Return the width and the number of embeddings."""
    info = tensors.get("token_embd.weight")
    return (info.shape[0], info.shape[1]) if info else (0, 0)


def _state_bytes(tensors: Mapping[str, TensorInfo], metadata: Metadata) -> int:
    """Return the bytes of the states of recurrent layers, for one sequence."""
    convolutions = [info.shape for name, info in tensors.items() if "ssm_conv1d.weight" in name]
    outputs = [info.shape[0] for name, info in tensors.items() if "ssm_out.weight" in name]
    values = sum((n_kernel - 1) * n for n_kernel, n, _ in convolutions)
    return 4 * (values + metadata.n_state * sum(outputs))


def _rows(tensors: Mapping[str, TensorInfo], part: str) -> int:
    """Return the most rows of a matrix with ``part`` in its name."""
    return max((info.shape[1] for name, info in tensors.items() if part in name), default=0)


def _buffer_bytes(
    tensors: Mapping[str, TensorInfo], metadata: Metadata, n_attended: int, n_cells: int
) -> int:
    """Return the bytes of compute buffers for each token of a batch, as measured.

    The largest of attention, feed-forward block and logits decides; masks are beside them.

    Args:
        tensors: Tensors of the model.
        metadata: Metadata of the model.
        n_attended: Scores of attention that are in memory together; 0 with flash attention.
        n_cells: Cells that a token may see.
    """
    width, n_vocab = _embeddings(tensors)
    masks = n_cells * (2 if metadata.has_window else 1)
    attention = n_attended + 7 * width
    if _rows(tensors, ".indexer."):  # scores of cells, their order, and another mask
        attention += 5 * n_cells // 2 + 2 * width
    forward = metadata.n_used * 3 * _rows(tensors, ".ffn_up") + (metadata.n_used + 3) * width
    recurrent = 5 * _rows(tensors, ".ssm_in")
    largest = max(attention, forward, recurrent, n_vocab + 2 * width)
    return _INPUT_BYTES + (4 if n_attended else 2) * masks + 4 * largest


def _work_bytes(tensors: Mapping[str, TensorInfo], metadata: Metadata, n_attended: int) -> int:
    """Return the bytes of operands for each token of a batch: scores as F16, others as Q8 or F16.

    The largest operand decides.
    """
    columns = max((info.shape[0] for info in tensors.values() if info.is_matrix), default=0)
    widest = max(columns, metadata.n_used * _rows(tensors, "ffn_up"))
    is_wide = any(info.type in _WIDE for info in tensors.values() if info.is_matrix)
    return max(2 * n_attended, 2 * widest if is_wide else 5 * widest // 4)
