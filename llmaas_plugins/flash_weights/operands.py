"""Operands of a layer: its four activations, each with the matrices that it is multiplied by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmaas_hooks import TensorInfo

__all__ = ["FAMILIES", "Operand", "operands"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}
"""Matrices that read the same activation, in channel order."""

_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Operand:
    """Activation of a layer, with the matrices that it is multiplied by.

    Attributes:
        layer: Index of the layer.
        family: Key of ``FAMILIES``.
        weights: Names of the matrices.
        n_channels: Number of values of the activation, which is the number of columns of each
            matrix.
    """

    layer: int
    family: str
    weights: tuple[str, ...]
    n_channels: int


def operands(tensors: Mapping[str, TensorInfo]) -> list[Operand]:
    """Return the operands of a model, by layer; experts and matrices with other names have none."""
    layers = sorted({int(match[1]) for match in map(_NAME.fullmatch, tensors) if match})
    found = (_operand(tensors, layer, family) for layer in layers for family in FAMILIES)
    return [operand for operand in found if operand is not None]


def _operand(tensors: Mapping[str, TensorInfo], layer: int, family: str) -> Operand | None:
    names = tuple(f"blk.{layer}.{matrix}.weight" for matrix in FAMILIES[family])
    widths = _widths(tensors, names)
    return Operand(layer, family, names, widths.pop()) if len(widths) == 1 else None


def _widths(tensors: Mapping[str, TensorInfo], names: Sequence[str]) -> set[int]:
    """Return the widths of these matrices; an empty set if the model lacks one."""
    infos = [tensors[name] for name in names if name in tensors]
    is_whole = len(infos) == len(names)
    return {info.shape[0] for info in infos} if is_whole and all(map(_is_plain, infos)) else set()


def _is_plain(info: TensorInfo) -> bool:
    return info.is_matrix and info.shape[2] == 1
