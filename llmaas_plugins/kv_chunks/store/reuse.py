"""Time that RAM of each size would save, from the distances at which chunks are used again.

The *distance* of a chunk is the bytes of all chunks that were used since its last use, with its
own context. A RAM tier of that size would still have it; a smaller one would not. Distances are
measured for chunks that left RAM, too, so the curve also tells what more RAM would save.

Chunks that were not needed yet have no distance. They are expected to be needed in about as long a
time as they have been left alone: a context that was just left is worth more than one of yesterday.

New chunks push the oldest ones out, long before memory is divided again. So distances begin after
as many bytes as the last seconds brought: a growing set of contexts gets its memory in advance.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["MissCosts", "ReuseCurve"]

_STEP = 2 << 20
_MOST_STEPS = 4096
"""Steps of the curve: 8 GiB. Chunks that are used again at a larger distance do not count."""
_MOST_CHUNKS = 1 << 16
_GUESS = 64 << 10
"""Bytes of a chunk until one was stored."""
_SOON_S = 10.0
"""Time in which chunks that were just left are expected to be needed."""
_AHEAD_S = 10.0
"""Time whose new chunks will find room that nothing else counts on."""


class MissCosts(NamedTuple):
    """Time that a chunk takes if it is not in RAM.

    Attributes:
        byte_s: Seconds for each byte that is read from disk.
        chunk_s: Seconds to evaluate a chunk's tokens again, if there is no disk tier.
    """

    byte_s: float
    chunk_s: float


@dataclass(slots=True, eq=False)
class _Request:
    """Request, and the chunks that it was the last one to use.

    Attributes:
        at_s: Time of the request.
        n_bytes: Bytes of these chunks.
        new_bytes: Bytes of those that no request has needed from RAM yet.
        n_new: Number of those.
    """

    at_s: float
    n_bytes: int = 0
    new_bytes: int = 0
    n_new: int = 0


@dataclass(slots=True, eq=False)
class _Use:
    """Last use of a chunk; ``is_new`` until a request needed the chunk from RAM."""

    n_bytes: int
    request: _Request
    is_new: bool


class ReuseCurve:
    """Seconds saved a second by RAM of each size. Use it under the store's lock."""

    def __init__(self) -> None:
        """Start without uses."""
        self._uses: dict[bytes, _Use] = {}  # by key, the least recently used first
        self._requests: dict[_Request, None] = {}  # those that were the last to use some chunk
        self._saved = RecentSums(_MOST_STEPS)
        self._typical = _GUESS
        self._costs = MissCosts(0.0, 0.0)
        self._since_s = time.monotonic()

    def wanted(self, keys: Sequence[bytes], byte_s: float, chunk_s: float) -> None:
        """Record chunks that a request could use again.

        Args:
            keys: Keys of the chunks.
            byte_s: Seconds that each byte takes if its chunk is not in RAM.
            chunk_s: Seconds that each such chunk takes beside that.
        """
        self._costs = MissCosts(byte_s, chunk_s)
        left = {key for key in keys if key in self._uses}
        for key in left:
            self._needed(self._uses[key])
        distance, steps, saved = 0, list[int](), list[float]()
        for key in reversed(self._uses):
            if not left:
                break
            n_bytes = self._uses[key].n_bytes
            distance += n_bytes
            if key in left:
                left.remove(key)
                steps.append(distance // _STEP)
                saved.append(n_bytes * byte_s + chunk_s)
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
        request = _Request(time.monotonic())
        self._requests[request] = None
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            before = self._forgotten(key)
            use = _Use(size or self._typical, request, before is None or before.is_new)
            self._uses[key] = use
            _count(use, 1)
        n_over = max(0, len(self._uses) - _MOST_CHUNKS)
        for key in list(itertools.islice(self._uses, n_over)):
            self._forgotten(key)
        if not request.n_bytes:
            self._requests.pop(request, None)

    def points(self, most: int) -> tuple[tuple[int, float], ...]:
        """Return bytes of RAM and the seconds that they save in a second, up to ``most`` bytes.

        As long as no chunk was used, or nobody knows the cost of a chunk that is not in RAM,
        nothing is known: there is only the point of 0 bytes.
        """
        if not any(self._costs):
            return ((0, 0.0),)
        each = self._saved.now() / TIME_S + self._expected(most)
        n_ahead = -(-self._coming_bytes() // _STEP)
        saved = np.cumsum(np.pad(each, (n_ahead, 0))[:_MOST_STEPS])
        changes = np.flatnonzero(np.diff(saved, prepend=0.0))
        points = [(0, 0.0)]
        for i in changes[: np.searchsorted(changes, most // _STEP)].tolist():
            points += [(i * _STEP, points[-1][1]), ((i + 1) * _STEP, float(saved[i]))]
        last = min(most, _MOST_STEPS * _STEP)
        if self._uses and points[-1][0] < last:
            points.append((last, points[-1][1]))
        return tuple(points)

    def _expected(self, most: int) -> NDArray[np.float64]:
        """Return the seconds a second that chunks save that no request has needed yet, by step.

        They are lower at first, as sums over the recent past are that they are compared with.
        """
        expected = np.zeros(_MOST_STEPS)
        distance, now = 0, time.monotonic()
        share = 1 - math.exp((self._since_s - now) / TIME_S)
        for request in reversed(self._requests):
            first = distance // _STEP
            distance += request.n_bytes
            if first >= min(most // _STEP, _MOST_STEPS):
                break
            n = distance // _STEP + 1 - first
            cost_s = request.new_bytes * self._costs.byte_s + request.n_new * self._costs.chunk_s
            each_s = share * cost_s / n
            expected[first : first + n] += each_s / (_SOON_S + now - request.at_s)
        return expected

    def _coming_bytes(self) -> int:
        """Return the bytes that new chunks took in the last seconds."""
        since = time.monotonic() - _AHEAD_S
        recent = itertools.takewhile(lambda one: one.at_s > since, reversed(self._requests))
        return sum(request.new_bytes for request in recent)

    def _needed(self, use: _Use) -> None:
        """Record that a request needed a chunk: from now on only its distances count."""
        _count(use, -1)
        use.is_new = False
        _count(use, 1)

    def _forgotten(self, key: bytes) -> _Use | None:
        """Forget the last use of a chunk and return it."""
        use = self._uses.pop(key, None)
        if use is not None:
            _count(use, -1)
            if not use.request.n_bytes:
                self._requests.pop(use.request, None)
        return use


def _count(use: _Use, sign: int) -> None:
    """Add a chunk to its request's, or with ``sign`` -1 remove it."""
    use.request.n_bytes += sign * use.n_bytes
    if use.is_new:
        use.request.new_bytes += sign * use.n_bytes
        use.request.n_new += sign
