"""Translate the widths of levels into the rows and columns of weights that the engine uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import LowRank, WeightClaim
from llmaas_plugins.elastic.units import KEYS_VALUES, Blocks, Widths

__all__ = ["COLUMNS", "ROWS", "Extents", "LevelAdapters", "extents_of", "part_claims"]

LevelAdapters = Mapping[int, Mapping[str, LowRank]]
"""Adapters by the index of the level, then by the name of the weight."""
Extents = tuple[int | None, ...]
"""Leading rows or columns of one weight, by level; None means all."""

ROWS = ("attn_q", "ffn_gate", "ffn_up")
"""Weights that produce the values of units. A level leaves out rows of them."""
COLUMNS = ("attn_output", "ffn_down")
"""Weights that read the values of units. A level leaves out columns of them."""


def extents_of(blocks: Blocks, levels: Sequence[Widths]) -> dict[str, Extents]:
    """Return the leading rows or columns of each weight that are in use, by level."""
    found: dict[str, Extents] = {}
    for layer in range(blocks.n_layers):
        groups = [int(one.groups[layer]) for one in levels]
        heads = _cut(groups, blocks.n_groups, blocks.group_width)
        neurons = _cut([int(one.neurons[layer]) for one in levels], blocks.n_ff, 1)
        for name in (*ROWS, *COLUMNS):
            found[f"blk.{layer}.{name}.weight"] = heads if name.startswith("attn") else neurons
        for name in KEYS_VALUES if blocks.cuts_keys_values else ():
            found[f"blk.{layer}.{name}.weight"] = _cut(groups, blocks.n_groups, blocks.head_dim)
    return found


def part_claims(
    blocks: Blocks,
    levels: Sequence[Widths],
    biases: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    adapters: LevelAdapters = MappingProxyType({}),
) -> list[WeightClaim]:
    """Return weight claims for the rows and columns in use.

    Args:
        blocks: Blocks of the model.
        levels: Widths by level.
        biases: Bias to add to each weight's product, by weight name; float32, ``(n_levels,
            n_embd)``.
        adapters: Adapters by the index of the level.
    """
    claims = []
    for name, extents in extents_of(blocks, levels).items():
        pattern, terms = re.escape(name), _by_level(adapters, name, len(levels))
        if name.split(".")[2] in COLUMNS:
            bias = biases.get(name)
            claims.append(WeightClaim(pattern, columns=extents, biases=bias, adapters=terms))
        else:
            claims.append(WeightClaim(pattern, rows=extents, adapters=terms))
    return claims


def _by_level(adapters: LevelAdapters, name: str, n_levels: int) -> tuple[LowRank | None, ...]:
    terms = tuple(adapters.get(level, {}).get(name) for level in range(n_levels))
    return terms if any(terms) else ()


def _cut(widths: Sequence[int], n_units: int, size: int) -> Extents:
    return tuple(None if width == n_units else width * size for width in widths)
