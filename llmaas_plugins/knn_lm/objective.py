"""What a subset is worth (§3.4, §4.1), and a lower bound on what a pair adds to it (§4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Members", "Objective", "squared_distances"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_MOST_ROWS = 2048
"""Of a block of distances: it stays in the caches."""
_LEAST = np.finfo(np.float32).tiny
"""A target that single precision gives no chance at all is not infinitely unlikely."""
_LEAST_LOSS = 1e-4
"""A pair that is no news at all has a chance to be drawn."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The constants of Eq 4.

    Attributes:
        theta: What squared distances are divided by (Eq 32).
        alpha: Weight of the datastore.
        c: What a pair at distance 0 is worth.
    """

    theta: float
    alpha: float = 0.5
    c: float = 1.0

    def probability(self, p_lm: Floats, sums: Floats) -> Floats:
        """p(y_i | x_i, S) of Eq 4.

        Args:
            p_lm: The model's probability of each target.
            sums: Of exp(-d) between each pair and the members of S that have its value.
        """
        return np.maximum((1 - self.alpha) * p_lm + self.alpha * self.c * sums, _LEAST)

    def loss(self, p_lm: Floats, sums: Floats) -> npt.NDArray[np.float64]:
        """-log p(y_i | x_i, S), which §4.2 identifies the bound with; above 0."""
        p = np.minimum(self.probability(p_lm, sums), 1, dtype=np.float64)
        return np.maximum(-np.log(p), _LEAST_LOSS)

    def bound(self, p_lm: Floats, sums: Floats) -> Floats:
        """Lower bound on the marginal gain of each pair, its gain for itself (Eq 8)."""
        return np.log1p(self.alpha * self.c / self.probability(p_lm, sums))

    def value(
        self, keys: Floats, values: Ints, p_lm: Floats, subset: npt.NDArray[np.integer]
    ) -> float:
        """f(S) = F(S) - F({}), exactly (Eq 3): quadratic in the number of pairs.

        Args:
            keys: Of all pairs, shape (n, d).
            values: Their targets.
            p_lm: The model's probabilities of these.
            subset: Which pairs are in S.
        """
        members = Members(self.theta, keys.shape[1])
        members.add(keys[subset], values[subset])
        with_s = self.probability(p_lm, members.sums(keys, values))
        without = self.probability(p_lm, np.zeros_like(p_lm))
        return float(
            np.log(with_s, dtype=np.float64).sum() - np.log(without, dtype=np.float64).sum()
        )


class Members:
    """A subset, ordered by value: only pairs of one value have anything to do with each other."""

    def __init__(self, theta: float, n_dims: int) -> None:
        """Start with none."""
        self._theta = np.float32(theta)
        self._keys = np.empty((0, n_dims), np.float32)
        self._values = np.empty(0, np.int32)

    def __len__(self) -> int:
        """How many."""
        return len(self._values)

    @property
    def n_bytes(self) -> int:
        """Memory that they take."""
        return self._keys.nbytes + self._values.nbytes

    def add(self, keys: Floats, values: Ints) -> None:
        """Let more in."""
        values = np.concatenate([self._values, values])
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._keys = np.concatenate([self._keys, keys])[order]

    def sums(self, keys: Floats, values: Ints) -> Floats:
        """Of each pair: the sum of exp(-d) over the members that have its value."""
        sums = np.zeros(len(values), np.float32)
        for mine, theirs in self._groups(values):
            members = self._keys[theirs]
            for start in range(0, len(mine), _MOST_ROWS):
                rows = mine[start : start + _MOST_ROWS]
                distances = squared_distances(keys[rows], members)
                sums[rows] = np.exp(distances / -self._theta).sum(axis=1)
        return sums

    def _groups(self, values: Ints) -> Iterator[tuple[npt.NDArray[np.intp], slice]]:
        """For each value of both sides: which of the pairs have it, and which members."""
        order = np.argsort(values, kind="stable")
        found, starts = np.unique(values[order], return_index=True)
        first = np.searchsorted(self._values, found, side="left")
        last = np.searchsorted(self._values, found, side="right")
        ends = np.append(starts[1:], len(values))
        for i in np.flatnonzero(last > first).tolist():
            yield order[starts[i] : ends[i]], slice(int(first[i]), int(last[i]))


def squared_distances(left: Floats, right: Floats) -> Floats:
    """Squared Euclidean distances of all pairs of rows, shape (len(left), len(right))."""
    sizes = np.einsum("ij,ij->i", left, left)[:, None] + np.einsum("ij,ij->i", right, right)
    return np.maximum(sizes - 2 * (left @ right.T), 0)
