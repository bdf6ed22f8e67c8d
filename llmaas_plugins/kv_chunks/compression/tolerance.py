"""Tolerance-aware compression (LLMS §3.2): choose how many bits each chunk keeps.

A chunk that receives much attention (its *information density*, Eq 1) tolerates little compression.
Eq 3 assigns bits to chunks so that most information is kept under a limit on the mean. The loss
from a chunk's quantization error is modeled as ``weight * 4^-bits``: a uniform quantizer's squared
error falls by a factor of 4 with each bit. The weight is the square of the density, because later
tokens see the error scaled by their attention, and independent errors add up in squares. A multiple
of the median density's square is added, because past attention says little about what will be asked
later. Eq 3 as printed weighs a chunk by 1/ratio; on real text this does worse than equal bits for
all chunks. docs/figures-kv-chunks.md reports both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["INT8_BITS", "allocate_bits", "densities"]

INT8_BITS = 8
"""Bits per value of int8, of which ``ratio`` is a share."""

_LATE_QUESTION_WEIGHT = 3.0
"""Multiple of the squared median density in each chunk's weight, as it may be asked for later.

The values 0, 1, 3 and 10 were tried. This is the smallest with which facts asked for late are
recalled as well as with equal bits for all chunks, within measurement error. It costs a little
accuracy on text that simply continues. docs/figures-kv-chunks.md reports both.
"""


def densities(
    attention: Sequence[float] | NDArray[np.float64], seen: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the information density of chunks (Eq 1), shape ``(n,)``.

    Args:
        attention: Attention to each chunk's tokens, summed over queries, heads and layers.
        seen: Number of scores in each sum. A chunk without scores gets the median density of the
            others, or 1 if no chunk has scores.
    """
    sums, counts = np.asarray(attention, np.float64), np.asarray(seen, np.float64)
    is_known = counts > 0
    found = sums / np.where(is_known, counts, 1.0)
    typical = float(np.median(found[is_known])) if is_known.any() else 1.0
    return np.where(is_known, found, typical)


def allocate_bits(
    density: NDArray[np.float64],
    levels: Sequence[int],
    ratio: float,
    most: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the bits of each chunk that maximize Eq 3 under a mean of ``8 * ratio`` bits.

    Each step from one level to the next has a gain, ``weight * (4^-low - 4^-high)``, and a price,
    the difference in bits. Steps are taken in descending order of gain per bit while the budget
    allows. Higher levels gain less per bit, so the steps of a chunk come in order. The weights at
    which the steps to a level end are the thresholds of Eq 2.

    Args:
        density: Information density of each chunk, shape ``(n,)``.
        levels: Numbers of bits to choose from.
        ratio: Mean bits as a share of 8.
        most: Current bits of each chunk, which it cannot exceed, shape ``(n,)``; None for no limit.

    Returns:
        Array of shape ``(n,)``. Every chunk gets at least the lowest level, or its ``most`` if
        that is lower, even if the mean then exceeds the limit.
    """
    rising = sorted(levels)
    n_chunks = len(density)
    bits = np.full(n_chunks, rising[0], dtype=np.int64)
    limit = np.full(n_chunks, rising[-1], dtype=np.int64) if most is None else most
    left = (INT8_BITS * ratio - rising[0]) * n_chunks
    prices = np.diff(rising)
    gains = -np.diff(4.0 ** -np.array(rising))
    weight = density**2 + _LATE_QUESTION_WEIGHT * np.median(density) ** 2
    worth = weight[:, None] * (gains / prices)
    for step in np.argsort(-worth, axis=None, kind="stable"):
        chunk, level = divmod(int(step), len(prices))
        target = rising[level + 1]
        if bits[chunk] == rising[level] and target <= limit[chunk] and prices[level] <= left:
            bits[chunk] = target
            left -= prices[level]
    return np.minimum(bits, limit)
