"""How much a model's loss grows when a layer is left out: which layers are anchors (§3.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.elastic.probing import Prober
from llmaas_plugins.elastic.units import Blocks, Widths, without_layers
from llmaas_plugins.evaluating import Evaluator, log_softmax

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
    """By layer, in nats a token: what leaving out its attention and its neurons costs.

    Args:
        prober: Of the evaluator's model.
        evaluator: Of it.
        blocks: Of the model.
        text: What to predict.
        n_tokens: Of the text, at most.
        progress: Told of tokens that are done.
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
    """Sum of negative logarithms of the tokens' probabilities."""
    chosen = np.take_along_axis(log_softmax(logits), tokens[:, None].astype(np.intp), axis=1)
    return -float(chosen.sum())
