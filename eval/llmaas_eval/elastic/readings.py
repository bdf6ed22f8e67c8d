"""What models of several widths make of the same windows of text, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.intervals import Interval

__all__ = [
    "Reading",
    "difference",
    "mean_reading",
    "mixed",
    "perplexity",
    "perplexity_ratio",
    "read_window",
]

_N_RESAMPLES = 4000

ByWindow = NDArray[np.float64]
"""Means over windows of equally many tokens, shape ``(n_windows,)``."""


class Reading(NamedTuple):
    """How a model reads windows of text, beside the full one; shape ``(n_windows,)`` each.

    Attributes:
        nats: Mean of -log p of each next token.
        kl: Mean Kullback-Leibler divergence from the full model's distribution, in nats.
        same: Share of tokens behind which the most likely one is the full model's.
    """

    nats: ByWindow
    kl: ByWindow
    same: ByWindow


def read_window(
    full: NDArray[np.float32], found: NDArray[np.float32], targets: NDArray[np.int32]
) -> tuple[float, float, float]:
    """Means of a window, as ``Reading`` has them.

    Args:
        full: Log probabilities of the full model, shape ``(n_tokens, n_vocab)``.
        found: Likewise, of the one that is read with.
        targets: The token that comes next, shape ``(n_tokens,)``.
    """
    nats = -found[np.arange(len(targets)), targets].astype(np.float64)
    kl = (np.exp(full) * (full - found)).sum(axis=1, dtype=np.float64)
    same = full.argmax(axis=1) == found.argmax(axis=1)
    return float(nats.mean()), float(kl.mean()), float(same.mean())


def mean_reading(readings: Sequence[Reading]) -> Reading:
    """Mean over several models, such as those of several seeds; of perplexity it is geometric."""
    return Reading(*(np.mean(values, axis=0) for values in zip(*readings, strict=True)))


def mixed(a: Reading, b: Reading, share: float) -> Reading:
    """What lies between two readings: ``share`` of the way from ``a`` to ``b``."""
    return Reading(*(x + share * (y - x) for x, y in zip(a, b, strict=True)))


def perplexity(found: Reading) -> float:
    """Of all windows."""
    return float(np.exp(found.nats.mean()))


def perplexity_ratio(found: Reading, base: Reading) -> Interval:
    """Perplexity over that of ``base`` on the same windows, with its paired 95 % interval."""
    return Interval(*(float(np.exp(value)) for value in difference(found.nats, base.nats)))


def difference(found: ByWindow, base: ByWindow) -> Interval:
    """Mean of ``found - base`` over windows, with its 95 % interval: windows are drawn anew."""
    apart, n = found - base, len(found)
    picks = np.random.default_rng(0).integers(0, n, (_N_RESAMPLES, n))
    low, high = np.percentile(apart[picks].mean(axis=1), [2.5, 97.5])
    return Interval(float(apart.mean()), float(low), float(high))
