"""Measure how much a model's loss grows without each layer, to choose the anchors (§3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.elastic.checkpoint import Checkpoint
from llmaas_plugins.elastic.probing import Prober
from llmaas_plugins.elastic.units import Blocks, Widths, without_layers
from llmaas_plugins.model.forward import Evaluator, log_softmax

__all__ = ["layer_losses"]

_RESULT = "layer losses"


def layer_losses(  # noqa: PLR0913 -- of what, with what, on what
    prober: Prober,
    evaluator: Evaluator,
    blocks: Blocks,
    windows: Sequence[Tokens],
    *,
    progress: Callable[[int], None] = lambda _n: None,
    checkpoint: Checkpoint | None = None,
) -> NDArray[np.float64]:
    """Return how much the loss grows, in nats per token, when each layer's units are left out.

    Args:
        prober: Prober of the evaluator's model.
        evaluator: Evaluator of the model.
        blocks: Blocks of the model.
        windows: Windows of text, as ``Evaluator.cut`` returns them.
        progress: Called with the number of tokens just evaluated.
        checkpoint: Where losses are kept, and where an earlier run kept them.
    """
    tried = [without_layers(blocks, [layer]) for layer in range(blocks.n_layers)]
    kept = None if checkpoint is None else checkpoint.get(_RESULT)
    losses = [] if kept is None else kept.tolist()
    progress(len(losses) * sum(map(len, windows)))
    for widths in [*tried, prober.full][len(losses) :]:
        losses.append(_loss(prober, evaluator, widths, windows, progress))
        if checkpoint is not None:
            checkpoint.keep({_RESULT: np.array(losses)})
    return np.array(losses[:-1]) - losses[-1]


def _loss(
    prober: Prober,
    evaluator: Evaluator,
    widths: Widths,
    windows: Sequence[Tokens],
    progress: Callable[[int], None],
) -> float:
    """Return the mean loss of the windows' tokens at some widths."""
    prober.set(widths)
    n, total = 0, 0.0
    for window in windows:
        for tokens, logits in evaluator.read(window):
            total += _surprise(tokens[1:], logits[:-1])
            n += len(tokens) - 1
            progress(len(tokens))
    return total / max(n, 1)


def _surprise(tokens: Tokens, logits: NDArray[np.float32]) -> float:
    """Return the sum of the tokens' negative log probabilities."""
    chosen = np.take_along_axis(log_softmax(logits), tokens[:, None].astype(np.intp), axis=1)
    return -float(chosen.sum())
