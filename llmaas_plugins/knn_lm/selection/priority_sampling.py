"""Selection over an endless stream, by priority sampling.

Algorithm 2 takes fixed shares of every buffer. Sooner or later even its smallest subset is full,
and all later pairs are ignored. Drawn pairs have weights, so priority sampling (Duffield, Lund and
Thorup, 2007) is possible instead. A pair gets the priority loss / r, where loss is -log p(y|x, S)
at its arrival and r is random in (0, 1]. The L pairs of highest priority are kept.

A kept pair's weight is one over its probability of being kept: the highest priority among dropped
pairs, divided by the pair's loss, but at least 1. One subset is thus always full, and has old pairs
as well as new ones.

With the paper's choice (``"top"``), r is 1: the pairs of the highest losses, which have the highest
bounds (Eq 8), are kept with weight 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.selection.algorithms import (
    BUFFER,
    Choice,
    PairSource,
    Selection,
    buffers,
    members_of,
)
from llmaas_plugins.knn_lm.selection.objective import Members, Objective

__all__ = ["PrioritySample", "PrioritySampler"]

_STALE = 1.1
"""Ratio of members to the limit at which members that were dropped are removed from the bound."""

Floats = npt.NDArray[np.float64]


class PrioritySample:
    """Pairs of a stream that are kept, and the numbers that decide which stay.

    Attributes:
        indices: Indices of the pairs, shape (n,).
        losses: Loss of each pair at its arrival.
        priorities: Priority of each pair.
        threshold: Highest priority of all dropped pairs; 0 if none was dropped.
    """

    def __init__(
        self,
        indices: npt.NDArray[np.int64],
        losses: Floats,
        priorities: Floats,
        threshold: float,
    ) -> None:
        """Store the arrays, which have one row per pair."""
        self.indices, self.losses, self.priorities = indices, losses, priorities
        self.threshold = threshold

    def joined(self, other: PrioritySample, size: int) -> PrioritySample:
        """Return the ``size`` pairs with the highest priority among both."""
        indices = np.concatenate([self.indices, other.indices])
        losses = np.concatenate([self.losses, other.losses])
        priorities = np.concatenate([self.priorities, other.priorities])
        threshold = max(self.threshold, other.threshold)
        if len(indices) > size:
            order = np.argsort(-priorities, kind="stable")
            threshold = max(threshold, float(priorities[order[size]]))
            rows = np.sort(order[:size])
            indices, losses, priorities = indices[rows], losses[rows], priorities[rows]
        return PrioritySample(indices, losses, priorities, threshold)

    def selection(self) -> Selection:
        """Return the pairs with their weights."""
        weights = np.maximum(1.0, self.threshold / self.losses)
        return Selection(self.indices, weights.astype(np.float32))


class PrioritySampler:
    """A selection that is updated along a stream.

    Attributes:
        kept: Pairs that are kept now, at most the limit.
        n_seen: Pairs of the stream seen so far.
    """

    def __init__(  # noqa: PLR0913 -- what to select from, and how
        self,
        source: PairSource,
        size: int,
        objective: Objective,
        *,
        how: Choice = "draw",
        buffer: int = BUFFER,
        seed: int = 0,
    ) -> None:
        """Start before the first pair.

        Args:
            source: Pairs of the stream, by index.
            size: L, the most pairs to keep.
            objective: Constants of Eq 4.
            how: Whether pairs are drawn, or those with the highest losses kept.
            buffer: B, pairs processed together.
            seed: Seed of all random choices.
        """
        self._source, self._size, self._objective = source, size, objective
        self._how, self._buffer, self._seed = how, buffer, seed
        self.n_seen = 0
        self.kept = PrioritySample(np.empty(0, np.int64), np.empty(0), np.empty(0), 0.0)
        self._members = Members(objective.theta, source.n_dims)

    def resume(self, kept: PrioritySample, n_seen: int) -> None:
        """Continue from another instance's ``kept`` and ``n_seen``."""
        self.kept, self.n_seen = kept, n_seen
        self._members = members_of(self._source, self._objective, kept.indices)

    def advance(self, n_come: int, *, is_end: bool = False) -> Iterator[int]:
        """Process pairs up to index ``n_come``; yield the number of new pairs after each buffer.

        Pairs that do not fill a buffer wait for the next call, unless ``is_end`` is set.
        """
        for batch in buffers(self.n_seen, n_come, self._buffer, is_end=is_end):
            rng = np.random.default_rng((self._seed, self.n_seen))
            keys, values = self._source.keys(batch), self._source.values[batch]
            sums = self._members.sums(keys, values)
            losses = self._objective.loss(self._source.p_lm[batch], sums)
            r = 1 - rng.random(len(batch)) if self._how == "draw" else 1.0
            come = PrioritySample(batch, losses, losses / r, 0.0)
            self.kept = self.kept.joined(come, self._size)
            stays = np.isin(batch, self.kept.indices)
            self._members.add(keys[stays], values[stays])
            if len(self._members) > _STALE * self._size:
                self._members = members_of(self._source, self._objective, self.kept.indices)
            self.n_seen += len(batch)
            yield len(batch)
