"""Score units by the gradient of the loss (ElastiLM §3.2, Eq 2), one layer at a time.

To first order, a unit's weights contribute the sum of (∂L/∂w)·w to the loss. The sum runs over the
column of ``ffn_down``, or the columns of ``attn_output``, that read the unit. It equals the
gradient of a gate of value 1 on the unit's output. So no gradient of a weight is kept: only the
inputs of the layers are kept, and each layer is computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.checkpoint import Checkpoint
from llmaas_plugins.elastic.fluctuation import calibration_of
from llmaas_plugins.elastic.torch_model import Decoder, Gates, Weights, Windows
from llmaas_plugins.elastic.units import Scores

__all__ = ["METHOD", "METHODS", "Terms", "gradient_scores", "loss_terms"]

METHOD = "fisher"

METHODS: Mapping[str, Callable[[Tensor], Tensor]] = {
    METHOD: lambda terms: terms[1:].square().sum(0),
    "taylor": lambda terms: terms.sum(0),
}
"""Reductions of a unit's terms over the tokens of a window.

The results are added up over windows; the score is the absolute value of the sum. ``taylor`` is the
paper's method (Eq 2): terms of different tokens cancel, however much each matters. ``fisher``
squares each token's term. It estimates the expected change of the loss to second order, because the
first order vanishes in a trained model. It skips a window's first token, which has no context and
therefore unusual values.
"""

_LEAST_TOKENS = 3
"""Least length of a window: the first token, which is skipped, one more, and its successor."""

_RESULT = "gradients"
_KEPT_BYTES = 256 << 20
"""Most bytes of layer inputs to keep; more windows need a new pass over the weights."""


class Terms(NamedTuple):
    """First-order contributions of one layer's units to the sum of a window's losses.

    Attributes:
        layer: Index of the layer.
        groups: Terms by token and KV group; float32, ``(n_tokens, n_groups)``.
        neurons: Terms by token and neuron; float32, ``(n_tokens, n_ff)``.
        weights: The layer's weights with their gradients, if these were requested; else empty.
    """

    layer: int
    groups: Tensor
    neurons: Tensor
    weights: Weights


def gradient_scores(  # noqa: PLR0913 -- of what, on what, how, and where it is told
    path: Path,
    tokens: Windows,
    *,
    method: str = METHOD,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _share: None,
    checkpoint: Checkpoint | None = None,
) -> Scores:
    """Return the importance of a model's units for a text.

    Args:
        path: Path of the model.
        tokens: Windows of the text, int32, ``(n_windows, n_tokens)``.
        method: Name of a method in ``METHODS``.
        seed: Seed that chose the windows; it is recorded with the scores.
        progress: Called with the share that is done, up to 1.
        checkpoint: Where sums are kept after every few windows, and where an earlier run kept them.

    Raises:
        ConfigError: The model cannot be elastic or computed here, the method is unknown, or the
            text is too short.
        StoreError: The model cannot be read.
    """
    if method not in METHODS:
        raise ConfigError(f"Unknown method {method!r}, expected one of {', '.join(METHODS)}.")
    if len(tokens) == 0 or tokens.shape[1] < _LEAST_TOKENS:
        raise ConfigError(
            f"Windows have shape {tokens.shape}, expected one or more of {_LEAST_TOKENS} tokens."
        )
    decoder, reduce = Decoder(path), METHODS[method]
    blocks = decoder.blocks
    groups = np.zeros((blocks.n_layers, blocks.n_groups))
    neurons = np.zeros((blocks.n_layers, blocks.n_ff))
    n_done, kept = 0, None if checkpoint is None else checkpoint.get(_RESULT)
    if kept is not None and kept.shape == (blocks.n_layers, blocks.n_groups + blocks.n_ff + 1):
        groups, neurons = kept[:, : blocks.n_groups].copy(), kept[:, blocks.n_groups : -1].copy()
        n_done = int(kept[0, -1])
    step = _windows_at_once(decoder, tokens)
    for start in range(n_done, len(tokens), step):
        some = tokens[start : start + step]
        for i, terms in enumerate(_loss_terms(decoder, some, of_weights=False)):
            groups[terms.layer] += reduce(terms.groups.double()).numpy()
            neurons[terms.layer] += reduce(terms.neurons.double()).numpy()
            progress((start + (i + 1) / blocks.n_layers) / len(tokens))
        if checkpoint is not None:
            n = np.full((blocks.n_layers, 1), start + len(some))
            checkpoint.keep({_RESULT: np.concatenate([groups, neurons, n], axis=1)})
    calibration = calibration_of(tokens.ravel(), seed, tokens.size, method)
    return Scores(np.abs(groups), np.abs(neurons), calibration)


def loss_terms(decoder: Decoder, windows: Windows, *, of_weights: bool = False) -> Iterator[Terms]:
    """Yield the terms by layer, from last to first, and window.

    Memory is needed for one layer and for the inputs of all layers.

    Args:
        decoder: The model.
        windows: Windows of the text; all tokens except each window's first are predicted.
        of_weights: Whether to leave the gradient of every weight in ``Terms.weights``, too.
    """
    step = _windows_at_once(decoder, windows)
    for start in range(0, len(windows), step):
        yield from _loss_terms(decoder, windows[start : start + step], of_weights=of_weights)


def _windows_at_once(decoder: Decoder, windows: Windows) -> int:
    """Return for how many windows the inputs of all layers are kept at once."""
    blocks, n_tokens = decoder.blocks, windows.shape[1] - 1
    return max(1, _KEPT_BYTES // ((blocks.n_layers + 1) * n_tokens * blocks.n_embd * 4))


def _loss_terms(decoder: Decoder, windows: Windows, *, of_weights: bool) -> Iterator[Terms]:
    inputs = [decoder.embed(windows[:, :-1])]
    for layer in range(decoder.blocks.n_layers):
        inputs.append(decoder.apply(layer, inputs[-1]))
    targets = torch.from_numpy(windows[:, 1:].astype(np.int64)).flatten()
    output = inputs.pop()
    slopes = decoder.loss_gradient(output.flatten(0, 1), targets).view_as(output)
    del output
    for layer in reversed(range(decoder.blocks.n_layers)):
        yield from _layer_terms(decoder, layer, inputs.pop(), slopes, of_weights=of_weights)


def _layer_terms(
    decoder: Decoder, layer: int, inputs: Tensor, slopes: Tensor, *, of_weights: bool
) -> Iterator[Terms]:
    """Yield the terms of a layer; turn the gradients of its outputs into those of its inputs."""
    weights = decoder.weights(layer)
    for x, slope in zip(inputs, slopes, strict=True):
        gates = _gates(decoder, len(x))
        x.requires_grad_()
        for weight in weights.values():
            weight.grad = None
            weight.requires_grad_(of_weights)
        decoder.block(layer, weights, x, gates).backward(slope)
        slope.copy_(x.grad)
        found = weights if of_weights else {}
        yield Terms(layer, gates.groups.grad, gates.neurons.grad, found)


def _gates(decoder: Decoder, n_tokens: int) -> Gates:
    n_groups, n_ff = decoder.blocks.n_groups, decoder.blocks.n_ff
    return Gates(
        torch.ones(n_tokens, n_groups, requires_grad=True),
        torch.ones(n_tokens, n_ff, requires_grad=True),
    )
