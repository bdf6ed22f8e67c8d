"""Losses of models of several widths on the same windows of text, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import Interval, mean_interval

__all__ = [
    "Reading",
    "mean_reading",
    "mixed",
    "perplexity",
    "perplexity_ratio",
    "read_window",
]

ByWindow = NDArray[np.float64]
"""Means over windows of equally many tokens, shape ``(n_windows,)``."""


class Reading(NamedTuple):
    """Loss of a model on windows of text, and its agreement with the full model.

    Each attribute has shape ``(n_windows,)``.

    Attributes:
        nats: Mean of -log p of the next tokens.
        kl: Mean Kullback-Leibler divergence from the full model's distribution, in nats.
        same: Share of positions whose most likely next token is the full model's.
    """

    nats: ByWindow
    kl: ByWindow
    same: ByWindow


def read_window(
    full: NDArray[np.float32], found: NDArray[np.float32], targets: NDArray[np.int32]
) -> tuple[float, float, float]:
    """Return one window's means: the values of ``nats``, ``kl`` and ``same`` in ``Reading``.

    Args:
        full: Log probabilities of the full model, shape ``(n_tokens, n_vocab)``.
        found: Log probabilities of the measured model, shape ``(n_tokens, n_vocab)``.
        targets: Next token at each position, shape ``(n_tokens,)``.
    """
    nats = -found[np.arange(len(targets)), targets].astype(np.float64)
    kl = (np.exp(full) * (full - found)).sum(axis=1, dtype=np.float64)
    same = full.argmax(axis=1) == found.argmax(axis=1)
    return float(nats.mean()), float(kl.mean()), float(same.mean())


def mean_reading(readings: Sequence[Reading]) -> Reading:
    """Return the mean over several models, such as several seeds.

    Losses are averaged in nats, so the mean of the perplexity is geometric.
    """
    return Reading(*(np.mean(values, axis=0) for values in zip(*readings, strict=True)))


def mixed(a: Reading, b: Reading, share: float) -> Reading:
    """Interpolate between two readings: ``share`` of the way from ``a`` to ``b``."""
    return Reading(*(x + share * (y - x) for x, y in zip(a, b, strict=True)))


def perplexity(found: Reading) -> float:
    """Return the perplexity over all windows."""
    return float(np.exp(found.nats.mean()))


def perplexity_ratio(found: Reading, base: Reading) -> Interval:
    """Return perplexity over ``base``'s on the same windows, with its paired 95 % interval."""
    return Interval(*(float(np.exp(value)) for value in mean_interval(found.nats - base.nats)))
