"""Compute biases that restore the mean of what a level leaves out (FLAP, An et al. 2024, §3.3).

A level without units j loses the products of their values x_j with columns W_j. The mean of these
products, W_j E[x_j], is a constant. It can be added to the product of the remaining units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from llmaas_plugins.elastic.fluctuation import ChannelMoments
from llmaas_plugins.elastic.metadata import OUTPUTS
from llmaas_plugins.elastic.units import Blocks, Widths
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["biases_of"]


def biases_of(
    path: Path,
    blocks: Blocks,
    levels: Sequence[Widths],
    moments: ChannelMoments,
    progress: Callable[[int], None] = lambda _n: None,
) -> NDArray[np.float16]:
    """Return the mean that each level's products lack.

    Args:
        path: Model file with its units in the order that ``levels`` refers to.
        blocks: Blocks of the model.
        levels: Widths by level.
        moments: Moments of the model's activations.
        progress: Called with 1 after each matrix.

    Returns:
        Biases of ``attn_output`` and ``ffn_down``; ``(n_levels, n_layers, 2, n_embd)``.
    """
    tensors = read_header(path).tensors
    content = np.memmap(path, np.uint8, mode="r")
    found = np.empty((len(levels), blocks.n_layers, len(OUTPUTS), blocks.n_embd), np.float16)
    for layer in range(blocks.n_layers):
        groups = [int(one.groups[layer]) * blocks.group_width for one in levels]
        neurons = [int(one.neurons[layer]) for one in levels]
        of_outputs = (groups, moments.head_means), (neurons, moments.neuron_means)
        for i, (widths, means) in enumerate(of_outputs):
            tensor = tensors[f"blk.{layer}.{OUTPUTS[i]}.weight"]
            rows = content[tensor.at : tensor.at + tensor.n_bytes].reshape(blocks.n_embd, -1)
            matrix = quants.dequantize(rows, tensor.type)
            found[:, layer, i] = _missing(matrix, means[layer], widths)
            progress(1)
    return found


def _missing(
    matrix: NDArray[np.float32], mean: NDArray[np.float64], widths: Sequence[int]
) -> NDArray[np.float32]:
    """Multiply the columns from each width on by their mean inputs; ``(n_widths, n_rows)``."""
    left_out = np.arange(matrix.shape[1])[:, None] >= np.array(widths)
    return (matrix @ (left_out * mean[:, None]).astype(np.float32)).T
