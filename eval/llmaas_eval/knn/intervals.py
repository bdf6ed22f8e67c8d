"""Paired 95 % intervals of changes of perplexity: conversations are drawn again, not tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "Surprise", "change", "mean_change", "perplexity"]

_N_RESAMPLES = 4000

Replicates = NDArray[np.float64]


class Surprise(NamedTuple):
    """What a text costs under a model, by conversation; shape ``(n_conversations,)`` each.

    Attributes:
        nats: Sum of -log p over its targets.
        n: Targets.
    """

    nats: NDArray[np.float64]
    n: NDArray[np.int64]

    @classmethod
    def of(cls, p: NDArray[np.float32], conversations: NDArray[np.int32]) -> Surprise:
        """From the probability of each target, and the conversation that it is of."""
        _, number = np.unique(conversations, return_inverse=True)
        nats = np.bincount(number, -np.log(p.astype(np.float64))).astype(np.float64)
        return cls(nats, np.bincount(number))


class Interval(NamedTuple):
    """A value, and the bootstrapped 95 % interval around it."""

    value: float
    low: float
    high: float


def perplexity(found: Surprise) -> float:
    """Of all targets."""
    return float(np.exp(found.nats.sum() / found.n.sum()))


def change(found: Surprise, base: Surprise, seed: int = 0) -> Interval:
    """By how much perplexity is higher than with ``base``, on the same text; in per cent."""
    return _interval(_change(found, base), _replicates(found, base, seed))


def mean_change(pairs: Sequence[tuple[Surprise, Surprise]]) -> Interval:
    """Mean over users of ``change``; each user's conversations are drawn again on their own."""
    values = [_change(found, base) for found, base in pairs]
    replicates = [_replicates(*pair, seed) for seed, pair in enumerate(pairs)]
    return _interval(float(np.mean(values)), np.mean(replicates, axis=0))


def _change(found: Surprise, base: Surprise) -> float:
    return 100 * (perplexity(found) / perplexity(base) - 1)


def _replicates(found: Surprise, base: Surprise, seed: int) -> Replicates:
    n = len(found.n)
    picks = np.random.default_rng(seed).integers(0, n, (_N_RESAMPLES, n))
    more = (found.nats - base.nats)[picks].sum(axis=1) / found.n[picks].sum(axis=1)
    return np.asarray(100 * np.expm1(more))


def _interval(value: float, replicates: Replicates) -> Interval:
    low, high = np.percentile(replicates, [2.5, 97.5])
    return Interval(value, float(low), float(high))
