"""Time that RAM of each size would save, from the distances at which chunks are used again.

The *distance* of a chunk is the bytes of all chunks that were used since its last use, with its
own context. A RAM tier of that size would still have it; a smaller one would not. Distances are
measured for chunks that left RAM, too, so the curve also tells what more RAM would save.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["MissCosts", "ReuseCurve"]

_STEP = 2 << 20
_MOST_STEPS = 4096
"""Steps of the curve: 8 GiB. Chunks that are used again at a larger distance do not count."""
_MOST_CHUNKS = 1 << 16
_GUESS = 64 << 10
"""Bytes of a chunk until one was stored."""


class MissCosts(NamedTuple):
    """Time that a chunk takes if it is not in RAM.

    Attributes:
        byte_s: Seconds for each byte that is read from disk.
        chunk_s: Seconds to evaluate a chunk's tokens again, if there is no disk tier.
    """

    byte_s: float
    chunk_s: float


class ReuseCurve:
    """Seconds saved a second by RAM of each size. Use it under the store's lock."""

    def __init__(self) -> None:
        """Start without uses."""
        self._sizes: dict[bytes, int] = {}  # by key, the least recently used first
        self._saved = RecentSums(_MOST_STEPS)
        self._typical = _GUESS

    def wanted(self, keys: Sequence[bytes], byte_s: float, chunk_s: float) -> None:
        """Record chunks that a request could use again.

        Args:
            keys: Keys of the chunks.
            byte_s: Seconds that each byte takes if its chunk is not in RAM.
            chunk_s: Seconds that each such chunk takes beside that.
        """
        left = {key for key in keys if key in self._sizes}
        distance, steps, saved = 0, list[int](), list[float]()
        for key in reversed(self._sizes):
            if not left:
                break
            distance += self._sizes[key]
            if key in left:
                left.remove(key)
                steps.append(distance // _STEP)
                saved.append(self._sizes[key] * byte_s + chunk_s)
        kept = np.array(steps, dtype=np.int64) < _MOST_STEPS
        self._saved.add(np.array(steps, dtype=np.int64)[kept], np.array(saved)[kept])

    def used(self, keys: Sequence[bytes], sizes: Sequence[int | None]) -> None:
        """Record that chunks were used or saved, the last one first.

        Args:
            keys: Keys of the chunks.
            sizes: Their bytes in whole pages; None or 0 for chunks that found no room. They count
                with the size of others, so that the curve says what room for them would save.
        """
        self._typical = max(filter(None, sizes), default=self._typical)
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            self._sizes.pop(key, None)
            self._sizes[key] = size or self._typical
        n_over = max(0, len(self._sizes) - _MOST_CHUNKS)
        for key in list(itertools.islice(self._sizes, n_over)):
            del self._sizes[key]

    def points(self, most: int) -> tuple[tuple[int, float], ...]:
        """Return bytes of RAM and the seconds that they save in a second, up to ``most`` bytes."""
        saved = np.cumsum(self._saved.now()) / TIME_S
        changes = np.flatnonzero(np.diff(saved, prepend=0.0))
        points = [(0, 0.0)]
        for i in changes[: np.searchsorted(changes, most // _STEP)].tolist():
            points += [(i * _STEP, points[-1][1]), ((i + 1) * _STEP, float(saved[i]))]
        return tuple(points)
