"""Text that a model writes itself, kept round by round, so that a stopped command continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens

if TYPE_CHECKING:
    from llmaas_plugins.elastic.checkpoint import Checkpoint
    from llmaas_plugins.model.forward import Evaluator

__all__ = ["SEED", "own_text"]

SEED = 0
_ROUND_TOKENS = 1024
"""Tokens that the model writes before they are kept."""


def own_text(
    evaluator: Evaluator, n_tokens: int, checkpoint: Checkpoint, progress: Callable[[int], None]
) -> Tokens:
    """Return up to ``n_tokens`` tokens that the model writes at temperature 1.

    It is fewer if tokens that begin a text are left out.

    Args:
        evaluator: The model.
        n_tokens: Tokens to evaluate.
        checkpoint: Place of the rounds that are complete.
        progress: Function that is told of each number of evaluated tokens.
    """
    rounds = [np.empty(0, np.int32)]
    for number, start in enumerate(range(0, n_tokens, _ROUND_TOKENS)):
        name, n = f"text {number}", min(_ROUND_TOKENS, n_tokens - start)
        said = checkpoint.get(name)
        if said is None or not _may_be_said(said, n, evaluator.n_vocab):
            said = evaluator.say(n, SEED + number, progress)
            checkpoint.keep({name: said})
        else:
            progress(n)
        rounds.append(said)
    return np.concatenate(rounds)


def _may_be_said(said: NDArray[Any], most: int, n_vocab: int) -> bool:
    """Return whether an array from a file may be a round of up to ``most`` tokens."""
    is_round = said.dtype == np.int32 and said.ndim == 1 and 0 < len(said) <= most
    return is_round and bool(said.min() >= 0 and said.max() < n_vocab)
