"""Model how often channels are used, what a cache finds of them, and what the other reads cost.

Values of a channel are assumed to be normal around 0, with the calibrated mean magnitude. Then the
threshold that leaves out a share of all values determines how often each channel passes it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TYPICAL_SPREAD",
    "Reads",
    "Shares",
    "cached_shares",
    "expected_reads",
    "typical_means",
    "use_rates",
]

Shares = NDArray[np.float64]
"""Shares by channel, busiest first."""

TYPICAL_SPREAD: Mapping[str, float] = {
    "attn_qkv": 0.27, "attn_output": 0.62, "ffn_up": 0.18, "ffn_down": 0.35,
}  # fmt: skip
"""Standard deviation of the logarithm of channel magnitudes, measured in a small model."""

_PAGE = 4096
_READ_BYTES = 256 << 10
"""Longest read of the engine, including gaps between channels."""
_HISTORY_TOKENS = 48
"""Mean number of tokens that uses are counted over; counts halve every 32 tokens."""
_STEPS = 32
"""Number of bisection steps."""
_MOST_SIGMAS = 8.0


def typical_means(family: str, n_channels: int) -> Shares:
    """Return lognormal magnitudes, for models that were not calibrated."""
    normal = NormalDist()
    at = (np.arange(n_channels) + 0.5) / n_channels
    return np.exp(-TYPICAL_SPREAD[family] * np.array([normal.inv_cdf(float(x)) for x in at]))


def use_rates(means: Shares, sparsity: float) -> Shares:
    """Return the share of tokens for which each channel is active; the mean is ``1 - sparsity``."""
    if sparsity <= 0:
        return np.ones(len(means))
    scales = np.maximum(means / means.mean(), 1e-9)
    low, high = 0.0, _MOST_SIGMAS * float(scales.max())
    for _ in range(_STEPS):
        threshold = (low + high) / 2
        rates = 2 * _below(-threshold / scales)
        low, high = (threshold, high) if rates.mean() > 1 - sparsity else (low, threshold)
    return rates


def cached_shares(rates: Shares, share: float) -> Shares:
    """Return the share of time that each channel is in a cache that holds ``share`` of them.

    The cache keeps the channels that were used most in recent tokens. So few tokens are counted
    that it is uncertain which of two similarly used channels stays.
    """
    if share >= 1:
        return np.ones(len(rates))
    if share <= 0:
        return np.zeros(len(rates))
    error = np.sqrt(np.maximum(rates * (1 - rates), 1e-12) / _HISTORY_TOKENS)
    low, high = -1.0, 2.0
    for _ in range(_STEPS):
        least = (low + high) / 2
        cached = _below((rates - least) / error)
        low, high = (least, high) if cached.mean() > share else (low, least)
    return cached


class Reads(NamedTuple):
    """Mean reads per token."""

    n_reads: float
    n_bytes: float

    def __add__(self, other: object) -> Reads:
        """Return the sum of both."""
        if not isinstance(other, Reads):
            return NotImplemented
        return Reads(self.n_reads + other.n_reads, self.n_bytes + other.n_bytes)


def expected_reads(missing: Shares, n_bytes: int, stride: int, gap_bytes: int) -> Reads:
    """Return the reads for an operand's missing channels, joined as the engine joins them.

    Args:
        missing: Share of tokens for which each channel has to be read, in file order.
        n_bytes: Bytes of a channel.
        stride: Bytes from one channel to the next in the file; more than ``n_bytes`` if other
            layers are in between.
        gap_bytes: Longest gap between channels that is read with them.
    """
    n_joined = (gap_bytes + n_bytes) // stride  # channels up to this far apart are read together
    there = np.concatenate([[0.0], np.cumsum(np.log1p(-np.minimum(missing, 1 - 1e-12)))])
    at = np.arange(len(missing))
    before = there[at] - there[np.maximum(0, at - n_joined)]
    n_runs = float(missing @ np.exp(before))
    if n_runs <= 0:
        return Reads(0, 0)
    needed = missing.sum() * n_bytes + sum(
        (away * stride - n_bytes) * _pairs(missing, there, away)
        for away in range(1, min(n_joined, len(missing) - 1) + 1)
    )
    n_reads = float(n_runs / -np.expm1(-_READ_BYTES * n_runs / needed))
    grain = int(np.gcd.reduce([n_bytes, stride, _PAGE]))
    return Reads(n_reads, float(needed + n_reads * (_PAGE - grain)))


def _pairs(missing: Shares, there: Shares, away: int) -> float:
    """Return the expected number of missing channels whose next missing one is ``away`` further."""
    first, last = missing[:-away], missing[away:]
    between = there[away : len(missing)] - there[1 : len(missing) - away + 1]
    return float((first * last) @ np.exp(between))


def _below(sigmas: Shares) -> Shares:
    """Return the share of a normal distribution below these values."""
    return np.interp(sigmas, *_normal())


@functools.cache
def _normal() -> tuple[Shares, Shares]:
    at = np.linspace(-_MOST_SIGMAS, _MOST_SIGMAS, 4001)
    normal = NormalDist()
    return at, np.array([normal.cdf(float(x)) for x in at])
