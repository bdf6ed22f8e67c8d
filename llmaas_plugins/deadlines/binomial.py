"""Exact confidence bounds of a share (Clopper and Pearson, 1934)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

__all__ = ["most_found", "upper_bound"]

_N_HALVINGS = 30


@functools.lru_cache(1024)
def upper_bound(n_found: int, n: int, error: float) -> float:
    """Return a share that the true one exceeds with a probability of at most ``error``.

    Args:
        n_found: How often the event was seen, 0 to ``n``.
        n: Number of independent trials; without any, the bound is 1.
        error: Probability that the bound is too low, above 0 and below 1.
    """
    if n_found >= n:
        return 1.0
    below, above = n_found / n, 1.0
    for _ in range(_N_HALVINGS):
        middle = (below + above) / 2
        if math.fsum(itertools.islice(_chances(n, middle), n_found + 1)) > error:
            below = middle
        else:
            above = middle
    return above


@functools.lru_cache(1024)
def most_found(n: int, share: float, error: float) -> int:
    """Return the largest number of events of which ``upper_bound`` is at most ``share``.

    Return -1 if there is none: if ``n`` is too small.
    """
    total = 0.0
    for i, chance in enumerate(_chances(n, share)):
        total += chance
        if total > error:
            return i - 1
    return n


# -- inside --------------------------------------------------------------------------------------


def _chances(n: int, share: float) -> Iterator[float]:
    """Yield the probabilities of 0, 1, … n events among ``n`` trials; 0 < ``share`` < 1."""
    log_odds, log_chance = math.log(share) - math.log1p(-share), n * math.log1p(-share)
    for i in range(n + 1):
        yield math.exp(log_chance)
        if i < n:
            log_chance += math.log((n - i) / (i + 1)) + log_odds
