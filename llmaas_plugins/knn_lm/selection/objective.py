"""The value of a subset (§3.4, §4.1), and a lower bound on a pair's marginal gain (§4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.datastore.distances import squared_distances

__all__ = ["Members", "Objective"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_MOST_ROWS = 2048
"""Most rows of a block of distances, so that the block stays in the processor's caches."""
_LEAST = np.finfo(np.float32).tiny
"""Smallest probability of a target, so that its logarithm is finite."""
_LEAST_LOSS = 1e-4
"""Smallest loss, so that every pair has a chance to be drawn."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Constants of Eq 4.

    Attributes:
        theta: Divisor of squared distances (Eq 32).
        alpha: Weight of the datastore.
        c: Contribution of a pair at distance 0.
    """

    theta: float
    alpha: float = 0.5
    c: float = 1.0

    def probability(self, p_lm: Floats, sums: Floats) -> Floats:
        """Return p(y_i | x_i, S) of Eq 4.

        Args:
            p_lm: The model's probability of each target.
            sums: For each pair, sum of exp(-d) over the members of S that have its value.
        """
        return np.maximum((1 - self.alpha) * p_lm + self.alpha * self.c * sums, _LEAST)

    def loss(self, p_lm: Floats, sums: Floats) -> npt.NDArray[np.float64]:
        """Return -log p(y_i | x_i, S), with which §4.2 identifies the bound; above 0."""
        p = np.minimum(self.probability(p_lm, sums), 1, dtype=np.float64)
        return np.maximum(-np.log(p), _LEAST_LOSS)

    def bound(self, p_lm: Floats, sums: Floats) -> Floats:
        """Return a lower bound on each pair's marginal gain: its gain for its own target (Eq 8)."""
        return np.log1p(self.alpha * self.c / self.probability(p_lm, sums))

    def value(
        self, keys: Floats, values: Ints, p_lm: Floats, subset: npt.NDArray[np.integer]
    ) -> float:
        """Return f(S) = F(S) - F({}), exactly (Eq 3), in time quadratic in the number of pairs.

        Args:
            keys: Keys of all pairs, shape (n, d).
            values: Targets of the pairs.
            p_lm: The model's probabilities of the targets.
            subset: Indices of the pairs in S.
        """
        members = Members(self.theta, keys.shape[1])
        members.add(keys[subset], values[subset])
        with_s = self.probability(p_lm, members.sums(keys, values))
        without = self.probability(p_lm, np.zeros_like(p_lm))
        return float(
            np.log(with_s, dtype=np.float64).sum() - np.log(without, dtype=np.float64).sum()
        )


class Members:
    """A subset ordered by value, because only pairs with the same value affect each other."""

    def __init__(self, theta: float, n_dims: int) -> None:
        """Start with no members."""
        self._theta = np.float32(theta)
        self._keys = np.empty((0, n_dims), np.float32)
        self._values = np.empty(0, np.int32)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._values)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the members take."""
        return self._keys.nbytes + self._values.nbytes

    def add(self, keys: Floats, values: Ints) -> None:
        """Add members."""
        values = np.concatenate([self._values, values])
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._keys = np.concatenate([self._keys, keys])[order]

    def sums(self, keys: Floats, values: Ints) -> Floats:
        """Return, for each pair, the sum of exp(-d) over the members that have its value."""
        sums = np.zeros(len(values), np.float32)
        for mine, theirs in self._groups(values):
            members = self._keys[theirs]
            for start in range(0, len(mine), _MOST_ROWS):
                rows = mine[start : start + _MOST_ROWS]
                distances = squared_distances(keys[rows], members)
                sums[rows] = np.exp(distances / -self._theta).sum(axis=1)
        return sums

    def _groups(self, values: Ints) -> Iterator[tuple[npt.NDArray[np.intp], slice]]:
        """Yield the pairs and the members with a value, for each value that both sides have."""
        order = np.argsort(values, kind="stable")
        found, starts = np.unique(values[order], return_index=True)
        first = np.searchsorted(self._values, found, side="left")
        last = np.searchsorted(self._values, found, side="right")
        ends = np.append(starts[1:], len(values))
        for i in np.flatnonzero(last > first).tolist():
            yield order[starts[i] : ends[i]], slice(int(first[i]), int(last[i]))
