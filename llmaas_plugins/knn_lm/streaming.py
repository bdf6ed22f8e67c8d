"""Selection over a stream without an end.

Algorithm 2 takes fixed shares of every buffer, so sooner or later even its smallest subset is full,
and what comes after that is never seen. Drawn pairs have weights, which allows for less: priority
sampling (Duffield, Lund and Thorup, 2007). A pair gets the priority loss / r, where loss is
-log p(y|x, S) when it comes and r is random in (0, 1]. The L pairs of highest priority are kept,
each as one over its chance of being among them: the highest priority of all that went, over its
loss, but at least 1. One subset that is always full, old pairs and new ones alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.objective import Members, Objective
from llmaas_plugins.knn_lm.selection import BUFFER, Selection, Source, buffers, members_of

__all__ = ["Kept", "Stream"]

_STALE = 1.1
"""Members, over the limit, at which those that went are taken out of the bound."""

Floats = npt.NDArray[np.float64]


class Kept:
    """Pairs of a stream, and what decides who stays.

    Attributes:
        indices: Which, shape (n,).
        losses: Of each when it came.
        priorities: Of each.
        threshold: The highest priority of all that went; 0 if none did.
    """

    def __init__(
        self,
        indices: npt.NDArray[np.int64],
        losses: Floats,
        priorities: Floats,
        threshold: float,
    ) -> None:
        """Belongs together."""
        self.indices, self.losses, self.priorities = indices, losses, priorities
        self.threshold = threshold

    def joined(self, other: Kept, size: int) -> Kept:
        """The ``size`` of both with the highest priority."""
        indices = np.concatenate([self.indices, other.indices])
        losses = np.concatenate([self.losses, other.losses])
        priorities = np.concatenate([self.priorities, other.priorities])
        threshold = max(self.threshold, other.threshold)
        if len(indices) > size:
            order = np.argsort(-priorities, kind="stable")
            threshold = max(threshold, float(priorities[order[size]]))
            rows = np.sort(order[:size])
            indices, losses, priorities = indices[rows], losses[rows], priorities[rows]
        return Kept(indices, losses, priorities, threshold)

    def selection(self) -> Selection:
        """With weights."""
        weights = np.maximum(1.0, self.threshold / self.losses)
        return Selection(self.indices, weights.astype(np.float32))


class Stream:
    """A selection that follows a stream.

    Attributes:
        kept: Pairs that are kept now, at most the limit.
        n_seen: Pairs of the stream so far.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        objective: Objective,
        *,
        buffer: int = BUFFER,
        seed: int = 0,
    ) -> None:
        """Start before the first pair.

        Args:
            source: Where the stream's pairs are: they have come up to an index.
            size: L, the most pairs to keep.
            objective: Constants of Eq 4.
            buffer: B, pairs that are looked at together.
            seed: Of all chance.
        """
        self._source, self._size, self._objective = source, size, objective
        self._buffer, self._seed = buffer, seed
        self.n_seen = 0
        self.kept = Kept(np.empty(0, np.int64), np.empty(0), np.empty(0), 0.0)
        self._members = Members(objective.theta, source.n_dims)

    def resume(self, kept: Kept, n_seen: int) -> None:
        """Go on from where another one was."""
        self.kept, self.n_seen = kept, n_seen
        self._members = members_of(self._source, self._objective, kept.indices)

    def advance(self, n_come: int, *, is_end: bool = False) -> Iterator[int]:
        """Take the pairs up to ``n_come`` in; yields after each buffer how many were new.

        What does not fill a buffer is left for the next time, unless this is the end.
        """
        for batch in buffers(self.n_seen, n_come, self._buffer, is_end=is_end):
            rng = np.random.default_rng((self._seed, self.n_seen))
            keys, values = self._source.keys(batch), self._source.values[batch]
            sums = self._members.sums(keys, values)
            losses = self._objective.loss(self._source.p_lm[batch], sums)
            come = Kept(batch, losses, losses / (1 - rng.random(len(batch))), 0.0)
            self.kept = self.kept.joined(come, self._size)
            stays = np.isin(batch, self.kept.indices)
            self._members.add(keys[stays], values[stays])
            if len(self._members) > _STALE * self._size:
                self._members = members_of(self._source, self._objective, self.kept.indices)
            self.n_seen += len(batch)
            yield len(batch)
