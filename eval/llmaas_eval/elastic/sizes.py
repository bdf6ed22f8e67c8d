"""Equal bytes: how many whole layers use the same bytes as our units at a level."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmaas_plugins.elastic.units import Blocks

__all__ = ["KeptLayers", "kept_layers"]


class KeptLayers(NamedTuple):
    """Number of layers that a method keeps at a given number of bytes.

    Attributes:
        n: The given bytes in layers, rounded up.
        share: Position of the given bytes between ``n - 1`` layers (0) and ``n`` layers (1).
    """

    n: int
    share: float


def kept_layers(blocks: Blocks, level: float) -> KeptLayers:
    """Return the layers that use as many bytes as a level computes with.

    Removed layers take their K and V projections along. If our levels keep all of these, slightly
    more than share ``level`` of the layers is kept.
    """
    exact = blocks.n_layers * blocks.computed_share(level)
    n = int(np.ceil(exact - 1e-9))
    return KeptLayers(n, 1 - (n - exact))
