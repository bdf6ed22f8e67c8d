"""Statistics of all studies: medians, means, ratios and perplexity, with paired 95 % intervals.

Intervals are bootstrapped over independent samples: pairs of runs, windows of text, or whole
conversations, because tokens of one conversation depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.demo.interval import Interval, interval, median_interval, resamples

__all__ = [
    "Interval",
    "Surprise",
    "change",
    "mean_change",
    "mean_interval",
    "median_interval",
    "perplexity",
    "quartiles",
    "ratio_of_means",
]

Values = NDArray[np.float64]


class Surprise(NamedTuple):
    """Surprisal of a text under a model by conversation; shape ``(n_conversations,)`` each.

    Attributes:
        nats: Sum of -log p over the conversation's targets.
        n: Number of the conversation's targets.
    """

    nats: Values
    n: NDArray[np.int64]

    @classmethod
    def of(cls, p: NDArray[np.float32], conversations: NDArray[np.int32]) -> Surprise:
        """Sum -log p of the targets by their conversation's number."""
        _, number = np.unique(conversations, return_inverse=True)
        nats = np.bincount(number, -np.log(p.astype(np.float64))).astype(np.float64)
        return cls(nats, np.bincount(number))


def quartiles(values: Values | Sequence[float]) -> str:
    """Return the median and the quartiles as text."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:.4g} [{low:.4g} {high:.4g}]"


def mean_interval(values: Values) -> Interval:
    """Return the mean of independent values."""
    return interval(float(values.mean()), values[resamples(len(values))].mean(axis=1))


def ratio_of_means(found: Values, base: Values) -> Interval:
    """Return the mean of ``found`` over the mean of ``base``; the samples are paired."""
    picks = resamples(len(base))
    replicates = found[picks].mean(axis=1) / base[picks].mean(axis=1)
    return interval(float(found.mean() / base.mean()), replicates)


def perplexity(found: Surprise) -> float:
    """Return the perplexity over all targets."""
    return float(np.exp(found.nats.sum() / found.n.sum()))


def change(found: Surprise, base: Surprise, seed: int = 0) -> Interval:
    """Return in percent how much perplexity is higher than ``base``'s on the same text."""
    return interval(_change(found, base), _changes(found, base, seed))


def mean_change(pairs: Sequence[tuple[Surprise, Surprise]]) -> Interval:
    """Return the mean of ``change`` over users; each user's conversations are resampled apart."""
    values = [_change(found, base) for found, base in pairs]
    replicates = [_changes(*pair, seed) for seed, pair in enumerate(pairs)]
    return interval(float(np.mean(values)), np.mean(replicates, axis=0))


def _change(found: Surprise, base: Surprise) -> float:
    return 100 * (perplexity(found) / perplexity(base) - 1)


def _changes(found: Surprise, base: Surprise, seed: int) -> Values:
    picks = resamples(len(found.n), seed)
    more = (found.nats - base.nats)[picks].sum(axis=1) / found.n[picks].sum(axis=1)
    return np.asarray(100 * np.expm1(more))
