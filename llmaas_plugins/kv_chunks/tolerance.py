"""Tolerance-aware compression (LLMS §3.2): which chunk keeps how many bits.

A chunk that gets much attention (its *information density*, Eq 1) tolerates little. Eq 3 gives bits
to chunks so that most information is kept under a mean. What is lost with an error in a chunk's
values is taken as ``weight * 4^-bits``. The weight is the density's square, since what looks at the
chunk sees the error times the attention, and errors of different chunks add up in squares; and some
of a typical chunk's square, since attention so far says little of what will be asked later. The
square of a uniform quantiser's error falls by 4 with each bit. Eq 3 as printed weighs a chunk by
1/ratio, which on real text does worse than giving all the same; docs/figures.md has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["INT8_BITS", "choose_levels", "densities"]

INT8_BITS = 8
"""What ``ratio`` is a share of."""

_ASKED_LATER = 3.0
"""Squares of the median density that each chunk counts for, as it may be asked for later.

The least of 0, 1, 3 and 10 with which facts that are asked for late are not remembered measurably
worse than with the same bits for all. Text that simply goes on pays a little for it;
docs/figures.md has both.
"""


def densities(
    attention: Sequence[float] | NDArray[np.float64], seen: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Information density of chunks (Eq 1), shape ``(n,)``.

    Args:
        attention: Sum of the attention that each chunk's tokens got, over queries, heads, layers.
        seen: How many scores that is the sum of. Where nothing was seen yet the density is the
            median of the others', or 1 if nothing was seen at all.
    """
    sums, counts = np.asarray(attention, np.float64), np.asarray(seen, np.float64)
    is_known = counts > 0
    found = sums / np.where(is_known, counts, 1.0)
    typical = float(np.median(found[is_known])) if is_known.any() else 1.0
    return np.where(is_known, found, typical)


def choose_levels(
    density: NDArray[np.float64],
    levels: Sequence[int],
    ratio: float,
    most: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Bits of each chunk: maximises Eq 3 under a mean of ``8 * ratio`` bits.

    Each step up a level has a gain, ``weight * (4^-low - 4^-high)``, and a price, the bits between
    the two. The steps are taken in the order of gain over price while they can be paid: higher
    levels gain less per bit, so a chunk's steps come in order, and the weights at which the steps
    to a level end are Eq 2's thresholds.

    Args:
        density: Information density of each chunk, shape ``(n,)``.
        levels: Bits to choose from.
        ratio: Mean bits as a share of int8's.
        most: Bits that each chunk has now and cannot exceed, shape ``(n,)``; None: any.

    Returns:
        Shape ``(n,)``. The lowest level even where the mean is below it.
    """
    rising = sorted(levels)
    n_chunks = len(density)
    bits = np.full(n_chunks, rising[0], dtype=np.int64)
    limit = np.full(n_chunks, rising[-1], dtype=np.int64) if most is None else most
    left = (INT8_BITS * ratio - rising[0]) * n_chunks
    prices = np.diff(rising)
    gains = -np.diff(4.0 ** -np.array(rising))
    weight = density**2 + _ASKED_LATER * np.median(density) ** 2
    worth = weight[:, None] * (gains / prices)
    for step in np.argsort(-worth, axis=None, kind="stable"):
        chunk, level = divmod(int(step), len(prices))
        target = rising[level + 1]
        if bits[chunk] == rising[level] and target <= limit[chunk] and prices[level] <= left:
            bits[chunk] = target
            left -= prices[level]
    return np.minimum(bits, limit)
