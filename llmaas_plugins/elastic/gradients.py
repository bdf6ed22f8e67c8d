"""How important units are by the loss's gradient (ElastiLM §3.2, Eq 2), a layer at a time.

What a unit's weights contribute to the loss to first order, sum of (∂L/∂w)·w over the column of
``ffn_down`` or the columns of ``attn_output`` that read it, is the gradient of a gate of 1 on its
output. So no gradient of a weight is ever kept; layers' inputs are, and layers are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.fluctuation import calibration_of
from llmaas_plugins.elastic.torch_model import Decoder, Gates, Weights, Windows
from llmaas_plugins.elastic.units import Scores

__all__ = ["METHOD", "METHODS", "Terms", "gradient_scores", "loss_terms"]

METHOD = "fisher"

METHODS: Mapping[str, Callable[[Tensor], Tensor]] = {
    METHOD: lambda terms: terms[1:].square().sum(0),
    "taylor": lambda terms: terms.sum(0),
}
"""What of a unit's terms, by token, is added up over windows. The score is its absolute value.

``taylor`` is the paper's (Eq 2): terms of different tokens cancel out, however much each matters.
``fisher`` takes each token's by itself, to second order: the expected change of the loss where the
first order vanishes, as it does in a model that is trained. A window's first token is left out:
with nothing before it, its values are like no other's.
"""

_LEAST_TOKENS = 3
"""Of a window: one that is left out, one that is not, and what follows it."""

_KEPT_BYTES = 256 << 20
"""Of layers' inputs, before weights are read again for more windows."""


class Terms(NamedTuple):
    """What one layer does to the sum of a window's losses, to first order.

    Attributes:
        layer: Which it is.
        groups: By token and KV group, float32, ``(n_tokens, n_groups)``.
        neurons: By token and neuron, float32, ``(n_tokens, n_ff)``.
        weights: The layer's with their gradients, if these were asked for.
    """

    layer: int
    groups: Tensor
    neurons: Tensor
    weights: Weights


def gradient_scores(
    path: Path,
    tokens: Windows,
    *,
    method: str = METHOD,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _share: None,
) -> Scores:
    """How important a model's units are to a text.

    Args:
        path: The model's file.
        tokens: Windows of the text, int32, ``(n_windows, n_tokens)``.
        method: In ``METHODS``.
        seed: Of what was drawn by chance to choose them; kept with the scores.
        progress: Told of how much is done, up to 1.

    Raises:
        ConfigError: The model cannot be elastic or be computed here, the method is unknown, or
            there is too little text.
        StoreError: The model cannot be read.
    """
    if method not in METHODS:
        raise ConfigError(f"Unknown method {method!r}, expected one of {', '.join(METHODS)}.")
    if len(tokens) == 0 or tokens.shape[1] < _LEAST_TOKENS:
        raise ConfigError(
            f"Windows are of shape {tokens.shape}, expected one or more of {_LEAST_TOKENS} tokens."
        )
    decoder, reduce = Decoder(path), METHODS[method]
    blocks = decoder.blocks
    groups = np.zeros((blocks.n_layers, blocks.n_groups))
    neurons = np.zeros((blocks.n_layers, blocks.n_ff))
    for i, terms in enumerate(loss_terms(decoder, tokens)):
        groups[terms.layer] += reduce(terms.groups.double()).numpy()
        neurons[terms.layer] += reduce(terms.neurons.double()).numpy()
        progress((i + 1) / (blocks.n_layers * len(tokens)))
    calibration = calibration_of(tokens.ravel(), seed, tokens.size, method)
    return Scores(np.abs(groups), np.abs(neurons), calibration)


def loss_terms(decoder: Decoder, windows: Windows, *, of_weights: bool = False) -> Iterator[Terms]:
    """By layer, last to first, and window: memory for one layer, and for its inputs.

    Args:
        decoder: The model.
        windows: Text; each window's tokens but the first are predicted.
        of_weights: Leave the window's gradient of every weight in ``Terms.weights``, too.
    """
    blocks, n_tokens = decoder.blocks, windows.shape[1] - 1
    n_kept = (blocks.n_layers + 1) * n_tokens * blocks.n_embd * 4
    step = max(1, _KEPT_BYTES // n_kept)
    for start in range(0, len(windows), step):
        yield from _loss_terms(decoder, windows[start : start + step], of_weights=of_weights)


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
    """From the loss's gradient with respect to the layer's outputs to that of its inputs."""
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
