"""Divide memory among claims by the time that it saves.

Each claim tells its savings as a curve. Curves may have cliffs: contexts that are used in turn
save nothing until all of them fit. Memory is therefore not given byte by byte to the claim whose
next byte saves most. Each step gives to one claim the amount that saves most time for each byte,
however large, if it still fits (Qureshi and Patt, "Utility-Based Cache Partitioning", MICRO 2006,
Algorithm 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import MemoryClaim
from llmaas_plugins.machine import total_bytes

__all__ = ["STEP", "Values", "divide", "saved_s", "values"]

STEP = 2 << 20
"""Bytes that are divided at a time."""


class Values(NamedTuple):
    """Worth of a claim's memory.

    Attributes:
        last: Seconds saved a second by each MiB of the last ones.
        next: Seconds that each MiB of the next ones would save in a second.
    """

    last: float
    next: float


def divide(n_bytes: int, claims: Sequence[MemoryClaim]) -> list[int]:
    """Return the bytes for each claim, together at most ``n_bytes``, to within a step for each.

    A claim keeps its least bytes, and all that it has if nothing is known of it; where that is too
    much, such claims shrink alike. They are not told to grow, as that would be a limit: they take
    what they need until something is known. Memory that is known to save no time goes to whom it
    saves some, and otherwise stays where it is. If there is more, the first claims get it. A claim
    whose memory would change by less than a step keeps what it has.
    """
    n_left = max(0, n_bytes) // STEP
    curves = [_curve(claim, n_bytes) for claim in claims]
    given = [0] * len(claims)
    for i, claim in enumerate(claims):
        given[i] = min(n_left, _steps(claim, claim.least))
        n_left -= given[i]
    unknown = [
        0 if claim.is_known else max(0, _steps(claim, claim.held) - n)
        for claim, n in zip(claims, given, strict=True)
    ]
    kept = min(n_left, sum(unknown))
    n_left -= kept
    given = [n + m for n, m in zip(given, _in_proportion(kept, unknown), strict=True)]
    while n_left:
        found = [_best(curve[n : n + n_left + 1]) for curve, n in zip(curves, given, strict=True)]
        best = max(range(len(found)), key=lambda i: found[i][0], default=None)
        if best is None or not found[best][0]:
            break
        given[best] += found[best][1]
        n_left -= found[best][1]
    for bounds in ([claim.held for claim in claims], [claim.most for claim in claims]):
        for i, bound in enumerate(bounds):
            more = min(n_left, max(0, min(bound, claims[i].most) // STEP - given[i]))
            given[i] += more
            n_left -= more
    sizes = [min(n * STEP, claim.most) for n, claim in zip(given, claims, strict=True)]
    return [
        size if _is_worth_telling(claim, size) else claim.held
        for size, claim in zip(sizes, claims, strict=True)
    ]


def saved_s(claim: MemoryClaim, size: int) -> float:
    """Return the seconds that a claim saves a second with memory of this size, in bytes."""
    return float(_saved_s(claim, np.array(size)))


def values(claim: MemoryClaim) -> Values:
    """Return what a claim's last and next bytes are worth."""
    curve = _curve(claim, total_bytes())
    n = min(claim.held // STEP, len(curve) - 1)
    each_mib = STEP >> 20
    return Values(_best(curve[n::-1], sign=-1)[0] / each_mib, _best(curve[n:])[0] / each_mib)


def _is_worth_telling(claim: MemoryClaim, size: int) -> bool:
    return abs(size - claim.held) >= STEP and (claim.is_known or size < claim.held)


def _steps(claim: MemoryClaim, n_bytes: int) -> int:
    """Return the steps that ``n_bytes`` of a claim take."""
    return -(-min(n_bytes, claim.most) // STEP)


def _in_proportion(n: int, wanted: Sequence[int]) -> list[int]:
    """Return ``n`` steps, divided in proportion to the wanted ones, which are as many or more."""
    ends = list(itertools.accumulate(wanted))
    borders = [end * n // ends[-1] if end else 0 for end in ends]
    return [end - start for start, end in itertools.pairwise([0, *borders])]


def _curve(claim: MemoryClaim, n_bytes: int) -> NDArray[np.float64]:
    """Return the seconds saved a second by 0, 1, … steps of memory, shape ``(n + 1,)``.

    Claims of more memory than there is are cut to ``n_bytes``: each step takes eight bytes here.
    """
    return _saved_s(claim, np.arange(max(0, min(claim.most, n_bytes)) // STEP + 1) * STEP)


def _saved_s(claim: MemoryClaim, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    points, seconds = np.array(claim.saved or [(0, 0.0)], dtype=np.float64).T
    return np.asarray(np.interp(sizes, points, seconds))


def _best(curve: NDArray[np.float64], sign: int = 1) -> tuple[float, int]:
    """Return the most seconds a step from the curve's first point on, and the number of steps.

    With ``sign`` -1 the curve is that of a shrinking claim, and the least seconds count.
    """
    if len(curve) < 2:
        return 0.0, 0
    slopes = sign * (curve[1:] - curve[0]) / np.arange(1, len(curve))
    n = int(slopes.argmin() if sign < 0 else slopes.argmax())
    return max(0.0, float(slopes[n])), n + 1
