"""Margin of a token: how much more likely it is than the next one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_two"]


def first_two(logits: NDArray[np.float32]) -> tuple[int, float]:
    """Return the most likely token, and its margin over the next one; ``(n_vocab,)``.

    The margin is a difference of log-probabilities. The logits are as before when this returns.
    """
    token = int(logits.argmax())
    first, logits[token] = float(logits[token]), -np.inf
    second = float(logits.max())
    logits[token] = first
    return token, first - second
