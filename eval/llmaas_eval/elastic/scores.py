"""Importance of units and layers as other methods define it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from llmaas_eval.elastic.texts import Windows
from llmaas_eval.weights import read_weights
from llmaas_plugins.elastic.fluctuation import calibration_of
from llmaas_plugins.elastic.units import Blocks, Scores, blocks_of

__all__ = ["layers_to_drop", "llm_pruner_scores", "magnitude_scores", "random_scores"]

_GROUP = {"attn_q": 1, "attn_k": 1, "attn_v": 1, "attn_output": 0}
_NEURON = {"ffn_gate": 1, "ffn_up": 1, "ffn_down": 0}
"""Axis to sum a unit's weights along, by matrix: 1 where a unit has rows, 0 where columns."""
_NOTHING = np.empty(0, np.int32)

Values = NDArray[np.float32]


def random_scores(blocks: Blocks, seed: int) -> Scores:
    """Return random scores."""
    rng = np.random.default_rng(seed)
    groups = rng.random((blocks.n_layers, blocks.n_groups))
    neurons = rng.random((blocks.n_layers, blocks.n_ff))
    return Scores(groups, neurons, calibration_of(_NOTHING, seed, 0, "random"))


def magnitude_scores(source: Path) -> Scores:
    """Return the norms of units' weights; a group's includes its keys' and values' weights."""
    weights, blocks = read_weights(GGUFReader(source)), blocks_of(source)
    groups, neurons = _coupled(blocks, lambda name: weights[f"{name}.weight"] ** 2)
    about = calibration_of(_NOTHING, 0, 0, "magnitude")
    return Scores(np.sqrt(groups), np.sqrt(neurons), about)


def llm_pruner_scores(source: Path, calibration: Windows) -> Scores:
    """Return first-order Taylor scores of single weights, summed over each unit.

    This is LLM-Pruner's element-wise importance (Ma et al. 2023, §3.2): |∂L/∂w · w| with the
    gradients of the whole text. A group sums rows of its queries, keys and values and columns of
    the attention output; a neuron sums its gate and up rows and its down column.
    """
    from llmaas_plugins.elastic.gradients import loss_terms
    from llmaas_plugins.elastic.torch_model import Decoder

    decoder = Decoder(source)
    sums: defaultdict[str, Values | float] = defaultdict(float)
    for terms in loss_terms(decoder, calibration.astype(np.int32), of_weights=True):
        for name, weight in terms.weights.items():
            sums[f"blk.{terms.layer}.{name}"] += (weight * weight.grad).detach().numpy()
    scores = _coupled(decoder.blocks, lambda name: np.abs(sums[f"{name}.weight"]))
    about = calibration_of(calibration.ravel(), 0, calibration.size, "LLM-Pruner")
    return Scores(*scores, about)


def layers_to_drop(source: Path, calibration: Windows) -> list[int]:
    """Return layers in the order in which ShortGPT removes them (Men et al. 2024, §3.2).

    The layer of least influence is first. A layer's influence is 1 minus the mean cosine
    similarity of its input and its output.
    """
    import torch

    from llmaas_plugins.elastic.torch_model import Decoder

    decoder, influence = Decoder(source), []
    x = decoder.embed(calibration.astype(np.int32))
    for layer in range(decoder.blocks.n_layers):
        y = decoder.apply(layer, x)
        influence.append(1 - float(torch.cosine_similarity(x, y, dim=-1).mean()))
        x = y
    return np.argsort(influence, kind="stable").tolist()


def _coupled(
    blocks: Blocks, values: Callable[[str], Values]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum ``values`` of weights over each group, and over each neuron.

    The shapes are ``(n_layers, n_groups)`` and ``(n_layers, n_ff)``.
    """

    def sums(matrices: Mapping[str, int], layer: int, n_units: int) -> NDArray[np.float64]:
        parts = [
            values(f"blk.{layer}.{name}").sum(axis, np.float64) for name, axis in matrices.items()
        ]
        return np.sum([part.reshape(n_units, -1).sum(axis=1) for part in parts], axis=0)

    layers = range(blocks.n_layers)
    return (
        np.stack([sums(_GROUP, layer, blocks.n_groups) for layer in layers]),
        np.stack([sums(_NEURON, layer, blocks.n_ff) for layer in layers]),
    )
