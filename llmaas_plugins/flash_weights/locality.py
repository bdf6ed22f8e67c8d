"""How often channels are used, what a cache finds of them, and what reading the others takes.

A channel's values are taken to be normal around 0, with the mean magnitude that was calibrated. So
the threshold that leaves out a share of all values tells how often each channel passes it.
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
    "cached_shares",
    "expected_reads",
    "typical_means",
    "use_rates",
]

Shares = NDArray[np.float64]
"""Of each channel, busiest first."""

TYPICAL_SPREAD: Mapping[str, float] = {
    "attn_qkv": 0.27, "attn_output": 0.62, "ffn_up": 0.18, "ffn_down": 0.35,
}  # fmt: skip
"""Standard deviation of the logarithm of channels' magnitudes, as seen in a small model."""

_PAGE = 4096
_READ_BYTES = 256 << 10
"""Of the engine: at most so much at once, also what lies between two channels."""
_HISTORY_TOKENS = 48
"""On average, that uses are counted over: they count half after every 32 tokens."""
_STEPS = 32
"""Of bisection."""
_MOST_SIGMAS = 8.0


def typical_means(family: str, n_channels: int) -> Shares:
    """Magnitudes as they might be, where none were calibrated: lognormal."""
    normal = NormalDist()
    at = (np.arange(n_channels) + 0.5) / n_channels
    return np.exp(-TYPICAL_SPREAD[family] * np.array([normal.inv_cdf(float(x)) for x in at]))


def use_rates(means: Shares, sparsity: float) -> Shares:
    """Share of tokens for which each channel is active; ``1 - sparsity`` in the mean."""
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
    """Share of the time that each channel is in a cache of this share of them.

    Those stay that were used most often of late. That is counted over few tokens, so it is
    uncertain which of two that are used about as often stays.
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
    """A token's, in the mean."""

    n_reads: float
    n_bytes: float

    def __add__(self, other: object) -> Reads:
        """Both."""
        if not isinstance(other, Reads):
            return NotImplemented
        return Reads(self.n_reads + other.n_reads, self.n_bytes + other.n_bytes)


def expected_reads(missing: Shares, n_bytes: int, stride: int, gap_bytes: int) -> Reads:
    """Reading the channels of an operand that are missing, as the engine does.

    Args:
        missing: Share of tokens for which each one has to be read, in the order of the file.
        n_bytes: Of one.
        stride: From one to the next in the file; more than that if other layers are in between.
        gap_bytes: Up to which what lies between two is read along.
    """
    n_joined = (gap_bytes + n_bytes) // stride  # so far off, the next one is read with this one
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
    """How many are missing, with the next missing one so far behind."""
    first, last = missing[:-away], missing[away:]
    between = there[away : len(missing)] - there[1 : len(missing) - away + 1]
    return float((first * last) @ np.exp(between))


def _below(sigmas: Shares) -> Shares:
    """Share of a normal distribution."""
    return np.interp(sigmas, *_normal())


@functools.cache
def _normal() -> tuple[Shares, Shares]:
    at = np.linspace(-_MOST_SIGMAS, _MOST_SIGMAS, 4001)
    normal = NormalDist()
    return at, np.array([normal.cdf(float(x)) for x in at])
