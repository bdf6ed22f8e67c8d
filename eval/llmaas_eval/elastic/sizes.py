"""Equal bytes: what units use, and how many layers another method keeps for as much."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.elastic.units import Blocks

__all__ = ["KeptLayers", "kept_layers", "kv_bytes"]


def kv_bytes(path: Path) -> int:
    """Of a model's K and V projections."""
    names = "attn_k.weight", "attn_v.weight"
    tensors = model_tensors(path).items()
    return sum(info.n_bytes for name, info in tensors if name.partition("blk.")[2].endswith(names))


class KeptLayers(NamedTuple):
    """What a method that removes whole layers keeps.

    Attributes:
        n: Layers: the fewest that use no fewer bytes than it may.
        share: How far on the way from one layer fewer what it may use lies.
    """

    n: int
    share: float


def kept_layers(blocks: Blocks, n_kv_bytes: int, level: float) -> KeptLayers:
    """For as many bytes as units use at ``level``, with all K and V projections.

    Whole layers go with theirs, so there are a few more of them than ``level`` of all.
    """
    n_bytes = sum(blocks.group_bytes) * blocks.n_groups + sum(blocks.neuron_bytes) * blocks.n_ff
    exact = blocks.n_layers * (level * n_bytes + n_kv_bytes) / (n_bytes + n_kv_bytes)
    n = int(np.ceil(exact - 1e-9))
    return KeptLayers(n, 1 - (n - exact))
