"""Biases that put back the mean of what a level leaves out (FLAP, An et al. 2024, §3.3).

A level without units j loses the products of their values x_j with columns W_j. Their mean,
W_j E[x_j], is a constant that can be added to the product with the units that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from llmaas_plugins.elastic.units import Blocks, Widths
from llmaas_plugins.gguf_header import read_header

__all__ = ["Means", "biases_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Of the values that output matrices read, in the order of the file's units.

    Attributes:
        heads: Attention's results; float64, ``(n_layers, n_groups * group_width)``.
        neurons: The feed-forward blocks' middles; float64, ``(n_layers, n_ff)``.
    """

    heads: NDArray[np.float64]
    neurons: NDArray[np.float64]


def biases_of(
    path: Path,
    blocks: Blocks,
    levels: Sequence[Widths],
    means: Means,
    progress: Callable[[int], None] = lambda _n: None,
) -> Mapping[str, NDArray[np.float32]]:
    """What each level's products lack on average.

    Args:
        path: A model whose units are in the order that ``levels`` means.
        blocks: Of it.
        levels: Widths by level.
        means: Of its values.
        progress: Told of matrices that are done.

    Returns:
        By name of the weight; ``(n_levels, n_embd)``.
    """
    tensors = read_header(path).tensors
    content = np.memmap(path, np.uint8, mode="r")
    found = {}
    for layer in range(blocks.n_layers):
        groups = [int(one.groups[layer]) * blocks.group_width for one in levels]
        neurons = [int(one.neurons[layer]) for one in levels]
        for matrix, widths, mean in (
            ("attn_output", groups, means.heads[layer]),
            ("ffn_down", neurons, means.neurons[layer]),
        ):
            name = f"blk.{layer}.{matrix}.weight"
            place = tensors[name]
            rows = content[place.at : place.at + place.n_bytes].reshape(blocks.n_embd, -1)
            found[name] = _missing(quants.dequantize(rows, place.type), mean, widths)
            progress(1)
    return found


def _missing(
    matrix: NDArray[np.float32], mean: NDArray[np.float64], widths: Sequence[int]
) -> NDArray[np.float32]:
    """Products with the mean of the columns from each width on; ``(n_widths, n_rows)``."""
    left_out = np.arange(matrix.shape[1])[:, None] >= np.array(widths)
    return (matrix @ (left_out * mean[:, None]).astype(np.float32)).T
