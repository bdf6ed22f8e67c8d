"""Changes that a restored context makes in the text that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmaas_eval.tolerance.engine import Continuation

__all__ = ["FIRST", "Outcome", "compare", "surprise"]

FIRST = 8
"""Number of tokens that count as directly after a restore."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Differences of a continuation after a restore from one with the original cells.

    Attributes:
        kl: Mean Kullback-Leibler divergence in nats.
        kl_first: Mean divergence in nats over the first ``FIRST`` tokens.
        top1: Share of positions whose most likely token is the same.
        top1_first: Share of such positions among the first ``FIRST`` tokens.
        surprise: Mean additional nats for the token that really follows.
        attention_error: Mean error of the attention's output, relative to the output's norm.
    """

    kl: float
    kl_first: float
    top1: float
    top1_first: float
    surprise: float
    attention_error: float


def compare(before: Continuation, after: Continuation, rest: Sequence[int]) -> Outcome:
    """Return the differences of two continuations; ``rest`` has one token more than they."""
    a, b = before.log_p, after.log_p
    kl = (np.exp(a) * (a - b)).sum(axis=1)
    same = a.argmax(axis=1) == b.argmax(axis=1)
    error = np.linalg.norm(after.attention - before.attention, axis=2)
    return Outcome(
        kl=float(kl.mean()),
        kl_first=float(kl[:FIRST].mean()),
        top1=float(same.mean()),
        top1_first=float(same[:FIRST].mean()),
        surprise=surprise(after, rest) - surprise(before, rest),
        attention_error=float((error / np.linalg.norm(before.attention, axis=2)).mean()),
    )


def surprise(found: Continuation, rest: Sequence[int]) -> float:
    """Return the mean nats for the tokens that really follow: the logarithm of perplexity."""
    return -float(found.log_p[np.arange(len(rest) - 1), rest[1:]].mean())
