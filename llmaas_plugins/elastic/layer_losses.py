"""Measure how much a model's loss grows without each layer, to choose the anchors (§3.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.elastic.probing import Prober
from llmaas_plugins.elastic.units import Blocks, Widths, without_layers
from llmaas_plugins.model.forward import Evaluator, log_softmax

__all__ = ["layer_losses"]


def layer_losses(  # noqa: PLR0913 -- of what, with what, on what
    prober: Prober,
    evaluator: Evaluator,
    blocks: Blocks,
    text: Tokens,
    n_tokens: int,
    *,
    progress: Callable[[int], None] = lambda _n: None,
) -> NDArray[np.float64]:
    """Return how much the loss grows, in nats per token, when each layer's units are left out.

    Args:
        prober: Prober of the evaluator's model.
        evaluator: Evaluator of the model.
        blocks: Blocks of the model.
        text: Tokens to predict.
        n_tokens: Most tokens of the text to use.
        progress: Called with the number of tokens just evaluated.
    """

    def loss(widths: Widths) -> float:
        prober.set(widths)
        n, total = 0, 0.0
        for tokens, logits in evaluator.predict(text, n_tokens):
            total += _surprise(tokens[1:], logits[:-1])
            n += len(tokens) - 1
            progress(len(tokens))
        return total / max(n, 1)

    losses = [loss(without_layers(blocks, [layer])) for layer in range(blocks.n_layers)]
    return np.array(losses) - loss(prober.full)


def _surprise(tokens: Tokens, logits: NDArray[np.float32]) -> float:
    """Return the sum of the tokens' negative log probabilities."""
    chosen = np.take_along_axis(log_softmax(logits), tokens[:, None].astype(np.intp), axis=1)
    return -float(chosen.sum())
