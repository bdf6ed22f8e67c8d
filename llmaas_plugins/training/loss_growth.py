"""Measure what it costs to leave out the smallest values of each activation.

To first order, leaving out values x_j of an activation changes the loss of a token by the sum of
-x_j ∂L/∂x_j. If tokens are drawn from the model's own predictions, the mean of this sum vanishes,
and half of its mean square is the growth of the KL divergence to second order (the Fisher
information). One backward pass gives it for all activations and shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from llmaas_hooks import ConfigError, Tokens
from llmaas_plugins.elastic.torch_model import Weights
from llmaas_plugins.flash_weights.operands import FAMILIES, Operand
from llmaas_plugins.flash_weights.shares import GRID
from llmaas_plugins.training.student import Teacher

__all__ = ["loss_growth"]

_KEPT_BYTES = 1 << 30
"""Most bytes of layer inputs to keep; more windows need another pass over the weights."""
_MOST_LOGITS = 1 << 24


def loss_growth(
    model: Teacher,
    windows: Sequence[Tokens],
    operands: Sequence[Operand],
    progress: Callable[[float], None] = lambda _share: None,
) -> dict[Operand, NDArray[np.float64]]:
    """Return the growth of the loss at each share of ``GRID``, in nats per token, by activation.

    A window's first token is skipped: it has no context, and therefore unusual values.

    Args:
        model: The model. Each layer is computed twice, so only the layers' inputs are kept.
        windows: Windows of text, each ``(n_tokens,)``.
        operands: Activations whose values can be left out.
        progress: Called with the share that is done, up to 1.

    Raises:
        ConfigError: The model's outputs are not finite.
    """
    growth = {operand: np.zeros(len(GRID)) for operand in operands}
    chance = torch.Generator().manual_seed(0)
    n_all = sum(map(len, windows))
    n_done, n_layers = 0, model.blocks.n_layers
    for some in _batches(model, windows):
        inputs, outputs = _forward(model, some)
        if not all(bool(each.isfinite().all()) for each in outputs):
            raise ConfigError(
                "the shares cannot be measured: some of the model's outputs are not finite. Is the "
                "file damaged?"
            )
        slopes = [
            model.loss_gradient(each[0], _drawn(model, each[0], chance))[None] for each in outputs
        ]
        n_some = sum(map(len, some))
        for layer in reversed(range(n_layers)):
            here = [operand for operand in operands if operand.layer == layer]
            for operand, sums in _layer_squares(model, layer, here, inputs.pop(), slopes):
                growth[operand] += sums
            progress((n_done + n_some * (1 - layer / n_layers)) / n_all)
        n_done += n_some
    n_tokens = max(n_all - len(windows), 1)
    return {operand: sums / (2 * n_tokens) for operand, sums in growth.items()}


# -- inside --------------------------------------------------------------------------------------


def _batches(model: Teacher, windows: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """Yield windows whose layer inputs are kept together."""
    token_bytes = 4 * (model.blocks.n_layers + 1) * model.blocks.n_embd
    some: list[Tokens] = []
    for window in windows:
        if some and sum(map(len, [*some, window])) * token_bytes > _KEPT_BYTES:
            yield some
            some = []
        some.append(window)
    if some:
        yield some


def _forward(model: Teacher, windows: Sequence[Tokens]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the inputs of all layers by layer and window, and the last layer's outputs."""
    inputs = [[model.embed(window[None]) for window in windows]]
    with torch.no_grad():
        for layer in range(model.blocks.n_layers):
            weights = model.weights(layer)
            inputs.append([model.block(layer, weights, x) for x in inputs[-1]])
    return inputs, inputs.pop()


def _drawn(model: Teacher, output: Tensor, chance: torch.Generator) -> Tensor:
    """Draw the next token of each position from the model's predictions, on any device alike."""
    step = max(1, _MOST_LOGITS // model.n_vocab)
    return torch.cat(
        [
            torch.multinomial(model.logits(some).softmax(-1).cpu(), 1, generator=chance)[:, 0]
            for some in output.split(step)
        ]
    ).to(model.device)


def _layer_squares(
    model: Teacher,
    layer: int,
    operands: Sequence[Operand],
    inputs: Sequence[Tensor],
    slopes: list[Tensor],
) -> Iterator[tuple[Operand, NDArray[np.float64]]]:
    """Yield the sums of squares of a layer's activations, window by window.

    ``slopes``, the gradients of the layer's outputs, are replaced by those of its inputs.
    """
    weights = model.weights(layer)
    for i, x in enumerate(inputs):
        slopes[i], gradients = _gradients(model, layer, weights, operands, x, slopes[i])
        for operand, (values, gradient) in zip(operands, gradients, strict=True):
            yield operand, _squares(values, gradient)


def _gradients(  # noqa: PLR0913, PLR0917  a layer with its input and output
    model: Teacher,
    layer: int,
    weights: Weights,
    operands: Sequence[Operand],
    x: Tensor,
    slopes: Tensor,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the gradient of a layer's input, and each activation with its gradient.

    Activations have the shape ``(n_tokens, n_channels)``.
    """
    x.requires_grad_()
    with torch.enable_grad():
        output, seen = model.operands(layer, weights, x)
        read = [seen[FAMILIES[operand.family][0]] for operand in operands]
        slope, *gradients = torch.autograd.grad(output, [x, *read], slopes)
    values = (each.detach()[0] for each in read)
    return slope, list(zip(values, (each[0] for each in gradients), strict=True))


def _squares(values: Tensor, gradients: Tensor) -> NDArray[np.float64]:
    """Return the sum over tokens of the squared terms of the smallest values, by share."""
    order = values.abs().argsort(-1)
    sums = (values * gradients).gather(-1, order).double().cumsum(-1)
    sums = functional.pad(sums, (1, 0))[1:]
    n_left_out = torch.from_numpy(np.rint(GRID * values.shape[-1]).astype(np.int64))
    found: NDArray[np.float64] = sums[:, n_left_out.to(sums.device)].square().sum(0).cpu().numpy()
    return found
