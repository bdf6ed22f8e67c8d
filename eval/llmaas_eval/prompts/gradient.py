"""Influence of a prompt's tokens on the likelihood of an answer, computed with torch."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.elastic.torch_model import Decoder, Weights

__all__ = ["KeptDecoder", "influences"]


class KeptDecoder(Decoder):
    """Decoder of a small model, whose weights stay in memory."""

    @functools.cache  # noqa: B019  there is one decoder
    def weights(self, layer: int) -> Weights:
        """Return the weights of a layer."""
        return super().weights(layer)


def influences(decoder: Decoder, prompt: Tokens, answer: Tokens) -> NDArray[np.float32]:
    """Return the gradient of the answer's log likelihood times each token's embedding.

    Args:
        decoder: The whole model.
        prompt: Tokens of the prompt.
        answer: Tokens that should follow.
    """
    tokens = np.concatenate([prompt, answer[:-1]])
    first = decoder.embed(tokens[None]).requires_grad_()
    x = first
    for layer in range(decoder.blocks.n_layers):
        x = decoder.block(layer, decoder.weights(layer), x)
    targets = torch.from_numpy(answer.astype(np.int64))
    gradient = torch.zeros_like(x)
    gradient[0, -len(answer) :] = decoder.loss_gradient(x[0, -len(answer) :], targets)
    x.backward(gradient)
    assert first.grad is not None
    return -(first.grad * first.detach())[0, : len(prompt)].sum(-1).numpy()
