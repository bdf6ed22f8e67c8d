"""Ways to give bits to chunks under the same mean; all but the layers' know a context's density."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.coded import MAX_BITS, Bits
from llmaas_plugins.kv_chunks.tolerance import choose_levels

__all__ = ["RIVALS", "Case", "as_printed", "by_layer"]

Values = NDArray[np.float64]


class Case(NamedTuple):
    """What a rival may look at.

    Attributes:
        density: Of each chunk.
        levels: Bits to choose from.
        mean: Mean bits at most.
        damage: What each layer alone at a number of bits did to other texts; shape
            ``(n_layer, 1 + MAX_BITS)``. For ``layers`` only.
        random: For what is random.
    """

    density: Values
    levels: Sequence[int]
    mean: float
    damage: Values | None
    random: np.random.Generator


def ours(case: Case) -> Bits:
    """What the plugin does."""
    return choose_levels(case.density, case.levels, case.mean / MAX_BITS)


def static(case: Case) -> Bits:
    """All the same; where the mean is between two numbers of bits, the newest have one more."""
    low, n = int(case.mean), len(case.density)
    bits = np.full(n, low)
    bits[n - int((case.mean - low) * n) :] += 1
    return bits


def random(case: Case) -> Bits:
    """Ours, given to other chunks."""
    return case.random.permutation(ours(case))


def recency(case: Case) -> Bits:
    """Ours, but the newest chunks have the most."""
    return np.sort(ours(case))


def layers(case: Case) -> Bits:
    """All chunks the same, more bits for layers that needed them on other texts."""
    return np.repeat(by_layer(case)[:, None], len(case.density), axis=1)


def by_layer(case: Case) -> Bits:
    """Bits of each layer: steps up in the order of damage saved over bits, while they fit."""
    damage = case.damage
    if damage is None:
        raise ValueError("bits by layer need what each layer's did to other texts")
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
    """Eq 3 with a chunk's information in proportion to its bits: all or nothing."""
    low, high, n = min(case.levels), max(case.levels), len(case.density)
    n_high = int((case.mean - low) * n / (high - low))
    bits = np.full(n, low)
    bits[np.argsort(-case.density, kind="stable")[:n_high]] = high
    return bits


def as_printed(case: Case) -> Bits:
    """Eq 3 as it is printed: information over ratio, so that few bits are worth most."""
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
"""``as printed`` needs three levels."""
