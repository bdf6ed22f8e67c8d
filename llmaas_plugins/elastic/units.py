"""Units that can be left out of a layer: KV groups and neurons.

A KV group is the query heads that share a key and value head: rows of ``attn_q`` and columns of
``attn_output``. A neuron is a row of ``ffn_gate`` and of ``ffn_up``, and a column of ``ffn_down``.
The units of a layer may be in any order (ElastiLM §3.2). Keys and values of a group, rows of
``attn_k`` and ``attn_v``, are left out with it only where the model was prepared so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.model.gguf_header import GGUFHeader, GGUFTensor, read_header

__all__ = [
    "FAMILIES",
    "KEYS_VALUES",
    "Blocks",
    "Calibration",
    "Scores",
    "Widths",
    "all_units",
    "blocks_in",
    "blocks_of",
    "is_q8_0",
    "without_layers",
]

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
"""Architectures that can be elastic, by their llama.cpp names."""

KEYS_VALUES = ("attn_k", "attn_v")
"""Weights that produce the keys and values of groups.

A level leaves out rows of them only if the model was prepared so. Otherwise the cells of every
level have all groups.
"""

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_BIASES = {"llama": _MATRICES, "qwen2": _MATRICES[:3], "qwen3": _MATRICES[:3]}
_GEMMA_NORMS = ("post_attention_norm", "post_ffw_norm")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_ROWS_TOGETHER = 8
"""Rows of a repacked matrix that can only be left out together."""
_NORMS = {"qwen3": _HEAD_NORMS, "gemma2": _GEMMA_NORMS, "gemma3": (*_GEMMA_NORMS, *_HEAD_NORMS)}


@dataclass(frozen=True, slots=True, eq=False)
class Widths:
    """Number of leading units in use in each layer.

    Attributes:
        groups: KV groups in use; int32, ``(n_layers,)``.
        neurons: Neurons in use; int32, ``(n_layers,)``.
    """

    groups: NDArray[np.int32]
    neurons: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Dimensions of a model's blocks; all layers have the same shape.

    Attributes:
        arch: Architecture, one of ``FAMILIES``.
        n_layers: Number of layers.
        n_groups: Number of KV heads of a layer.
        heads_per_group: Number of query heads that share a KV head.
        head_dim: Width of a head.
        n_embd: Width of the blocks' input and output.
        n_ff: Number of neurons of a layer.
        group_granule: Number of groups that can only be moved or left out together. It is 1, unless
            a quantization block of ``attn_output`` spans several groups, or keys and values are cut
            and a head has no multiple of 8 rows.
        granule: Number of neurons that can only be moved or left out together: the block size of
            ``ffn_down``'s type, or 1.
        group_bytes: Bytes of one group that a level leaves out, by layer: those in ``attn_q`` and
            ``attn_output``, and ``key_value_bytes`` with ``cuts_keys_values``.
        neuron_bytes: Bytes of one neuron in ``ffn_gate``, ``ffn_up`` and ``ffn_down``, by layer.
        key_value_bytes: Bytes of one group in ``attn_k`` and ``attn_v``, by layer.
        cuts_keys_values: Whether levels also leave out rows of ``attn_k`` and ``attn_v``.
    """

    arch: str
    n_layers: int
    n_groups: int
    heads_per_group: int
    head_dim: int
    n_embd: int
    n_ff: int
    group_granule: int
    granule: int
    group_bytes: tuple[float, ...]
    neuron_bytes: tuple[float, ...]
    key_value_bytes: tuple[float, ...]
    cuts_keys_values: bool

    @property
    def group_width(self) -> int:
        """Rows of ``attn_q``, and columns of ``attn_output``, per group."""
        return self.heads_per_group * self.head_dim

    @property
    def n_bytes(self) -> float:
        """Bytes of all units."""
        return sum(self.group_bytes) * self.n_groups + sum(self.neuron_bytes) * self.n_ff

    def share(self, widths: Widths) -> float:
        """Return the share of all units' bytes that widths use.

        Bytes of K and V projections count only if levels cut them.
        """
        groups, neurons = np.array(self.group_bytes), np.array(self.neuron_bytes)
        return float(groups @ widths.groups + neurons @ widths.neurons) / self.n_bytes

    def computed_share(self, share: float) -> float:
        """Return the share of the bytes of all matrices, K and V included, at a share of units."""
        whole = 0.0 if self.cuts_keys_values else sum(self.key_value_bytes) * self.n_groups
        return (share * self.n_bytes + whole) / (self.n_bytes + whole)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Record of how scores were computed.

    Attributes:
        sha256: SHA-256 of the calibration tokens, as little-endian int32.
        seed: Seed of the random choices.
        n_tokens: Number of calibration tokens.
        method: Name of the scoring method.
    """

    sha256: str
    seed: int
    n_tokens: int
    method: str


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Importance of units; higher is more important. Scores are comparable only within one layer.

    Attributes:
        groups: Scores of the groups; float64, ``(n_layers, n_groups)``.
        neurons: Scores of the neurons; float64, ``(n_layers, n_ff)``.
        calibration: How the scores were computed.
        layers: Increase of the loss when a layer is left out, in nats per token; float64,
            ``(n_layers,)``. None if not measured.
    """

    groups: NDArray[np.float64]
    neurons: NDArray[np.float64]
    calibration: Calibration
    layers: NDArray[np.float64] | None = None


def all_units(blocks: Blocks) -> Widths:
    """Return the widths of the whole model."""
    return without_layers(blocks, ())


def without_layers(blocks: Blocks, layers: Collection[int]) -> Widths:
    """Return the widths that use all units except those of the given layers."""
    is_kept = np.array([layer not in layers for layer in range(blocks.n_layers)], np.int32)
    return Widths(blocks.n_groups * is_kept, blocks.n_ff * is_kept)


def blocks_of(path: Path, *, cuts_keys_values: bool = False) -> Blocks:
    """Read the blocks of a model file.

    Args:
        path: GGUF file.
        cuts_keys_values: Whether levels also leave out rows of ``attn_k`` and ``attn_v``.

    Raises:
        ConfigError: The file is no GGUF, or its model cannot be elastic. The message says why.
        StoreError: The file cannot be read.
    """
    return blocks_in(read_header(path), path, cuts_keys_values=cuts_keys_values)


def is_q8_0(path: Path) -> bool:
    """Return whether every ``ffn_down`` of a model is Q8_0, which loses little if requantized.

    Raises:
        ConfigError: The file is no GGUF.
        StoreError: The file cannot be read.
    """
    tensors = read_header(path).tensors.items()
    return all(each.type.name == "Q8_0" for name, each in tensors if ".ffn_down.weight" in name)


def blocks_in(header: GGUFHeader, path: Path, *, cuts_keys_values: bool = False) -> Blocks:
    """Return the blocks of a model whose header was already read.

    Args:
        header: Header of the file.
        path: Path for messages.
        cuts_keys_values: Whether levels also leave out rows of ``attn_k`` and ``attn_v``.

    Raises:
        ConfigError: The model cannot be elastic.
    """
    try:
        return _blocks(header, cuts_keys_values=cuts_keys_values)
    except _UnfitError as error:
        raise ConfigError(
            f"{path} cannot be made elastic: {error}. Supported are dense models of the families "
            f"{', '.join(FAMILIES)}."
        ) from error


# -- inside --------------------------------------------------------------------------------------


class _UnfitError(Exception):
    """Reason why a model cannot be elastic."""


def _blocks(header: GGUFHeader, *, cuts_keys_values: bool) -> Blocks:
    arch = _served_arch(header)
    number = _Numbers(header, arch)
    n_layers, n_embd = number("block_count"), number("embedding_length")
    n_heads = number("attention.head_count")
    n_groups = number("attention.head_count_kv", n_heads)
    head_dim = number("attention.key_length", n_embd // n_heads)
    if number("attention.value_length", n_embd // n_heads) != head_dim:
        raise _UnfitError("its keys and values differ in width")
    if n_heads % n_groups:
        raise _UnfitError(f"its {n_heads} query heads do not share {n_groups} KV heads evenly")
    n_ff = number("feed_forward_length")
    _check_tensors(header, arch, n_layers)
    layers = [_matrices(header, i) for i in range(n_layers)]
    shapes = _shapes(n_embd, n_heads * head_dim, n_groups * head_dim, n_ff)
    for i, layer in enumerate(layers):
        _check_shapes(header, i, layer, shapes)
    cut = ("attn_q", "attn_output", *(KEYS_VALUES if cuts_keys_values else ()))
    together = _ROWS_TOGETHER // math.gcd(_ROWS_TOGETHER, head_dim) if cuts_keys_values else 1
    return Blocks(
        arch=arch,
        n_layers=n_layers,
        n_groups=n_groups,
        heads_per_group=n_heads // n_groups,
        head_dim=head_dim,
        n_embd=n_embd,
        n_ff=n_ff,
        group_granule=_group_granule(layers, n_groups, n_heads // n_groups * head_dim, together),
        granule=math.lcm(*(layer["ffn_down"].block_columns for layer in layers)),
        group_bytes=tuple(_bytes(layer, *cut) / n_groups for layer in layers),
        neuron_bytes=tuple(
            _bytes(layer, "ffn_gate", "ffn_up", "ffn_down") / n_ff for layer in layers
        ),
        key_value_bytes=tuple(_bytes(layer, *KEYS_VALUES) / n_groups for layer in layers),
        cuts_keys_values=cuts_keys_values,
    )


def _served_arch(header: GGUFHeader) -> str:
    arch = header.fields.get("general.architecture")
    if (header.whole_number("split.count") or 0) > 1:
        raise _UnfitError("it is one of several files; merge them with `llama-gguf-split --merge`")
    if (header.whole_number(f"{arch}.expert_count") or 0) > 0:
        raise _UnfitError(f"it is a mixture of experts ({arch})")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise _UnfitError(f"it is of the family {arch!r}")
    return arch


class _Numbers:
    """Reader of the architecture's whole numbers; refuses numbers that differ between layers."""

    def __init__(self, header: GGUFHeader, arch: str) -> None:
        self._header, self._arch = header, arch

    def __call__(self, key: str, default: int | None = None) -> int:
        key = f"{self._arch}.{key}"
        found = self._header.whole_number(key) if key in self._header.fields else default
        if found is None or not 0 < found < 1 << 20:
            raise _UnfitError(f"its metadata has no {key}, or has one that differs between layers")
        return found


def _check_tensors(header: GGUFHeader, arch: str, n_layers: int) -> None:
    """Refuse a model with tensors that this module does not know."""
    known = {f"{matrix}.weight" for matrix in (*_MATRICES, *_NORMS.get(arch, ()))}
    known |= {f"{matrix}.bias" for matrix in _BIASES.get(arch, ())}
    known |= {f"{matrix}.scale" for matrix in _MATRICES}  # one factor for a whole matrix
    known |= {"attn_norm.weight", "ffn_norm.weight"}
    for name in header.tensors:
        match = re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name)
        if match and int(match[1]) < n_layers and match[2] == "attn_qkv.weight":
            raise _UnfitError(f"{name} holds queries, keys and values in one matrix")
        if match and (int(match[1]) >= n_layers or match[2] not in known):
            raise _UnfitError(f"it has the tensor {name}, which {arch} models do not have")


def _matrices(header: GGUFHeader, i: int) -> dict[str, GGUFTensor]:
    missing = [name for name in _MATRICES if f"blk.{i}.{name}.weight" not in header.tensors]
    if missing:
        raise _UnfitError(f"it has no tensor blk.{i}.{missing[0]}.weight")
    return {name: header.tensors[f"blk.{i}.{name}.weight"] for name in _MATRICES}


def _shapes(n_embd: int, n_queries: int, n_keys: int, n_ff: int) -> dict[str, tuple[int, int]]:
    """Return the columns and rows of a layer's matrices."""
    return {
        "attn_q": (n_embd, n_queries),
        "attn_k": (n_embd, n_keys),
        "attn_v": (n_embd, n_keys),
        "attn_output": (n_queries, n_embd),
        "ffn_gate": (n_embd, n_ff),
        "ffn_up": (n_embd, n_ff),
        "ffn_down": (n_ff, n_embd),
    }


def _check_shapes(
    header: GGUFHeader, i: int, layer: dict[str, GGUFTensor], shapes: dict[str, tuple[int, int]]
) -> None:
    """Refuse a layer with a matrix, bias or scale whose shape does not fit the metadata."""
    for name, shape in shapes.items():
        bias = header.tensors.get(f"blk.{i}.{name}.bias")
        scale = header.tensors.get(f"blk.{i}.{name}.scale")
        if layer[name].shape != shape or (bias and bias.shape != shape[1:]):
            raise _UnfitError(f"the shape of blk.{i}.{name} differs from the metadata's")
        if scale and math.prod(scale.shape) > 1:
            raise _UnfitError(f"blk.{i}.{name}.scale has more than one value")


def _group_granule(
    layers: list[dict[str, GGUFTensor]], n_groups: int, width: int, together: int
) -> int:
    """Return the least number of groups whose columns of ``attn_output`` are whole blocks.

    It is a multiple of ``together``, or all groups.
    """
    columns = math.lcm(*(layer["attn_output"].block_columns for layer in layers))
    granule = math.lcm(columns // math.gcd(columns, width), together)
    return granule if n_groups % granule == 0 else n_groups


def _bytes(layer: dict[str, GGUFTensor], *names: str) -> int:
    return sum(layer[name].n_bytes for name in names)
