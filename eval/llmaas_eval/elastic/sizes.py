"""Equal bytes: how many whole layers use the same bytes as our units at a level."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.elastic.units import Blocks

__all__ = ["KeptLayers", "kept_layers", "kv_bytes"]


def kv_bytes(path: Path) -> int:
    """Return the bytes of a model's K and V projections."""
    names = "attn_k.weight", "attn_v.weight"
    tensors = model_tensors(path).items()
    return sum(info.n_bytes for name, info in tensors if name.partition("blk.")[2].endswith(names))


class KeptLayers(NamedTuple):
    """Number of layers that a method keeps at a given number of bytes.

    Attributes:
        n: The given bytes in layers, rounded up.
        share: Position of the given bytes between ``n - 1`` layers (0) and ``n`` layers (1).
    """

    n: int
    share: float


def kept_layers(blocks: Blocks, n_kv_bytes: int, level: float) -> KeptLayers:
    """Return the layers that use as many bytes as our units at ``level`` plus all K and V.

    Our levels keep all K and V projections; removed layers take theirs along. So slightly more
    than share ``level`` of the layers is kept.
    """
    n_bytes = sum(blocks.group_bytes) * blocks.n_groups + sum(blocks.neuron_bytes) * blocks.n_ff
    exact = blocks.n_layers * (level * n_bytes + n_kv_bytes) / (n_bytes + n_kv_bytes)
    n = int(np.ceil(exact - 1e-9))
    return KeptLayers(n, 1 - (n - exact))
