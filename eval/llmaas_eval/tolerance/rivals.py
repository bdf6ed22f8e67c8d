"""Ways to assign bits to chunks at one mean; all but ``layers`` know a context's density."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.coded import MAX_BITS, Bits
from llmaas_plugins.kv_chunks.compression.tolerance import allocate_bits

__all__ = ["RIVALS", "Case", "as_printed", "by_layer"]

Values = NDArray[np.float64]


class Case(NamedTuple):
    """Input of a rival.

    Attributes:
        density: Information density of each chunk.
        levels: Bits to choose from.
        mean: Highest allowed mean bits.
        damage: Divergence on other texts with one layer at a number of bits; shape
            ``(n_layer, 1 + MAX_BITS)``. Only ``layers`` uses it.
        random: Generator for random choices.
    """

    density: Values
    levels: Sequence[int]
    mean: float
    damage: Values | None
    random: np.random.Generator


def ours(case: Case) -> Bits:
    """Return the plugin's choice."""
    return allocate_bits(case.density, case.levels, case.mean / MAX_BITS)


def static(case: Case) -> Bits:
    """Return equal bits for all chunks; if the mean is fractional, the newest have one bit more."""
    low, n = int(case.mean), len(case.density)
    bits = np.full(n, low)
    bits[n - int((case.mean - low) * n) :] += 1
    return bits


def random(case: Case) -> Bits:
    """Return the bits of ``ours`` in random order."""
    return case.random.permutation(ours(case))


def recency(case: Case) -> Bits:
    """Return the bits of ``ours`` in rising order, so that the newest chunks have the most."""
    return np.sort(ours(case))


def layers(case: Case) -> Bits:
    """Return equal bits for all chunks, but more bits for layers that needed them.

    The damage on other texts shows which layers needed more.
    """
    return np.repeat(by_layer(case)[:, None], len(case.density), axis=1)


def by_layer(case: Case) -> Bits:
    """Return the bits of each layer.

    Layers step up to more bits in the order of damage saved per bit, while the mean allows it.
    """
    damage = case.damage
    if damage is None:
        raise ValueError("bits by layer need the damage of each layer on other texts, found None")
    rising = sorted(case.levels)
    n_layer = len(damage)
    bits = np.full(n_layer, rising[0])
    left = (case.mean - rising[0]) * n_layer
    while True:
        best, gain = None, 0.0
        for layer in range(n_layer):
            for level in rising:
                price = level - bits[layer]
                saved = damage[layer, bits[layer]] - damage[layer, level]
                if 0 < price <= left and saved / price > gain:
                    best, gain = (layer, level), saved / price
        if best is None:
            return bits
        left -= best[1] - bits[best[0]]
        bits[best[0]] = best[1]


def linear(case: Case) -> Bits:
    """Return the bits of Eq 3 if information is proportional to bits: all or nothing."""
    low, high, n = min(case.levels), max(case.levels), len(case.density)
    n_high = int((case.mean - low) * n / (high - low))
    bits = np.full(n, low)
    bits[np.argsort(-case.density, kind="stable")[:n_high]] = high
    return bits


def as_printed(case: Case) -> Bits:
    """Return the bits of Eq 3 as printed: information over ratio, so that low bits count most."""
    rising = sorted(case.levels)
    n = len(case.density)
    order = np.argsort(-case.density, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(case.density[order])])
    best, cuts = -1.0, (0, 0)
    for first in range(n + 1):
        for second in range(first, n + 1):
            counts = np.array([first, second - first, n - second])
            if case.mean * n - rising[-1] < counts @ rising <= case.mean * n:
                parts = np.diff(sums[[0, first, second, n]])
                if (parts / rising).sum() > best:
                    best, cuts = (parts / rising).sum(), (first, second)
    bits = np.empty(n, np.int64)
    bits[order] = np.repeat(rising, [cuts[0], cuts[1] - cuts[0], n - cuts[1]])
    return bits


RIVALS: Mapping[str, Callable[[Case], Bits]] = {
    "ours": ours,
    "static": static,
    "random": random,
    "recency": recency,
    "layers": layers,
    "linear": linear,
    "as printed": as_printed,
}
"""Rivals by name; ``as printed`` needs three levels."""
