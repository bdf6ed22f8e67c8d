"""Paired 95 % intervals of changes of perplexity, from a bootstrap over conversations.

Tokens of one conversation depend on each other, so whole conversations are resampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "Surprise", "change", "mean_change", "perplexity"]

_N_RESAMPLES = 4000

Replicates = NDArray[np.float64]


class Surprise(NamedTuple):
    """Surprisal of a text under a model by conversation; shape ``(n_conversations,)`` each.

    Attributes:
        nats: Sum of -log p over the conversation's targets.
        n: Number of the conversation's targets.
    """

    nats: NDArray[np.float64]
    n: NDArray[np.int64]

    @classmethod
    def of(cls, p: NDArray[np.float32], conversations: NDArray[np.int32]) -> Surprise:
        """Sum -log p of the targets by their conversation's number."""
        _, number = np.unique(conversations, return_inverse=True)
        nats = np.bincount(number, -np.log(p.astype(np.float64))).astype(np.float64)
        return cls(nats, np.bincount(number))


class Interval(NamedTuple):
    """A value and its bootstrapped 95 % interval."""

    value: float
    low: float
    high: float


def perplexity(found: Surprise) -> float:
    """Return the perplexity over all targets."""
    return float(np.exp(found.nats.sum() / found.n.sum()))


def change(found: Surprise, base: Surprise, seed: int = 0) -> Interval:
    """Return in percent how much perplexity is higher than ``base``'s on the same text."""
    return _interval(_change(found, base), _replicates(found, base, seed))


def mean_change(pairs: Sequence[tuple[Surprise, Surprise]]) -> Interval:
    """Return the mean of ``change`` over users; each user's conversations are resampled apart."""
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
