"""What a restored context changes in the text that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.engine import Continuation

__all__ = ["FIRST", "Interval", "Outcome", "compare", "interval", "surprise"]

FIRST = 8
"""Tokens right after a restore."""
_N_RESAMPLES = 4000

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A continuation after a restore, against that of the cells as they were.

    Attributes:
        kl: Mean Kullback-Leibler divergence, in nats.
        kl_first: Of the ``FIRST`` tokens.
        top1: Share of positions whose most likely token is the same.
        top1_first: Of the ``FIRST`` tokens.
        surprise: Mean nats more for the token that really comes.
        attention_error: Of what attention puts out, relative to its norm.
    """

    kl: float
    kl_first: float
    top1: float
    top1_first: float
    surprise: float
    attention_error: float


class Interval(NamedTuple):
    """A mean, and the bootstrapped 95 % interval around it."""

    mean: float
    low: float
    high: float


def compare(before: Continuation, after: Continuation, rest: Sequence[int]) -> Outcome:
    """What the two differ in; ``rest`` has one token more than was evaluated."""
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
    """Mean nats for the tokens that really come: the logarithm of perplexity."""
    return -float(found.log_p[np.arange(len(rest) - 1), rest[1:]].mean())


def interval(values: Values) -> Interval:
    """Of values of independent texts."""
    picks = np.random.default_rng(0).integers(0, len(values), (_N_RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))
