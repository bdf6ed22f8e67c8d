"""Selection of pairs (§4): Algorithm 1 over the full datastore, Algorithm 2 over a stream.

Both look at batches of pairs, bound each pair's gain for the subset chosen so far (Eq 8), and take
some pairs of the batch. The paper takes those with the highest bound (``"top"``). By default, pairs
are *drawn* here in proportion to -log p(y|x, S), the loss with which §4.2 identifies the bound. A
subset of only the hardest pairs would represent ordinary text badly. Each drawn pair is weighted by
one over its probability of being drawn, because it stands for similar pairs that were not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.selection.objective import Members, Objective

__all__ = [
    "BUFFER",
    "Choice",
    "Online",
    "PairSource",
    "Selection",
    "buffers",
    "choose",
    "members_of",
    "offline",
    "online",
]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Choice = Literal["draw", "top"]

ROUNDS = 10
"""T of Algorithm 1."""
CANDIDATES = 5
"""B / b of Algorithm 1."""
BUFFER = 10_000
"""B of Algorithm 2."""
SHARES = (0.1, 0.2, 0.4, 0.8, 1.0)
"""b_j / B of Algorithm 2: each twice the one before, and 1."""
_ENOUGH = 0.6
"""Share of the limit that a candidate subset must exceed to be returned (appendix B.1)."""


class PairSource(Protocol):
    """A full datastore to select from.

    Attributes:
        values: Targets of the pairs, shape (n,).
        p_lm: The model's probabilities of the targets, shape (n,).
        n_dims: Numbers in a key.
    """

    values: Ints
    p_lm: Floats
    n_dims: int

    def keys(self, indices: Indices) -> Floats:
        """Return keys of some pairs, shape (len(indices), n_dims)."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Pairs that were kept.

    Attributes:
        indices: Indices of the pairs, shape (n,).
        weights: For each pair, how many pairs it stands for, above 0; shape (n,).
    """

    indices: Indices
    weights: Floats

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.indices)


_NONE = Selection(np.empty(0, np.int64), np.empty(0, np.float32))


def offline(  # noqa: PLR0913 -- the parameters of Algorithm 1
    source: PairSource,
    size: int,
    objective: Objective,
    *,
    how: Choice = "draw",
    rounds: int = ROUNDS,
    candidates: int = CANDIDATES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _n: None,
) -> Selection:
    """Select with Algorithm 1: in each of T rounds, take b of B random remaining pairs.

    This takes O(B T) bounds, whatever the size of the full datastore. An exception from
    ``progress`` ends the selection between two rounds.

    Args:
        source: Full datastore.
        size: L, the most pairs to keep.
        objective: Constants of Eq 4.
        how: How to take pairs in a round.
        rounds: T.
        candidates: B / b.
        seed: Seed of all random choices.
        progress: Called after each round with the number of pairs taken in it.
    """
    n = len(source.values)
    if size >= n:
        progress(n)
        return Selection(np.arange(n), np.ones(n, np.float32))
    rng = np.random.default_rng(seed)
    members = Members(objective.theta, source.n_dims)
    is_left = np.ones(n, np.bool_)
    parts = [_NONE]
    for share in _shares(size, rounds):
        left = np.flatnonzero(is_left)
        batch = np.sort(rng.choice(left, min(candidates * share, len(left)), replace=False))
        keys = source.keys(batch)
        sums = members.sums(keys, source.values[batch])
        taken, weights = choose(objective, source.p_lm[batch], sums, share, how, rng)
        members.add(keys[taken], source.values[batch[taken]])
        is_left[batch[taken]] = False
        parts.append(Selection(batch[taken], weights))
        progress(share)
    return _joined(parts)


def choose(  # noqa: PLR0913, PLR0917 -- the inputs of one step of both algorithms
    objective: Objective,
    p_lm: Floats,
    sums: Floats,
    n: int,
    how: Choice,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Take ``n`` of a batch's pairs, and return their indices and weights.

    Args:
        objective: Constants of Eq 4.
        p_lm: The model's probability of each target.
        sums: ``Members.sums`` of the batch.
        n: Number of pairs to take; all if the batch has fewer.
        how: Whether to take the highest bounds, or draw.
        rng: Random generator for draws.
    """
    n = min(n, len(p_lm))
    if n == 0:
        return np.empty(0, np.intp), np.empty(0, np.float32)
    if how == "top":
        taken = np.argpartition(-objective.bound(p_lm, sums), n - 1)[:n]
        return np.sort(taken), np.ones(n, np.float32)
    chances = _chances(objective.loss(p_lm, sums), n)
    taken = _drawn(chances, n, rng)
    return taken, (1 / chances[taken]).astype(np.float32)


class Online:
    """Algorithm 2: h subsets of a stream of unknown length, one buffer of B pairs at a time.

    Each subset takes a different share of every buffer; a subset that outgrows the limit is given
    up. The stream can stop after any buffer: ``selections`` and ``n_seen`` suffice to resume.
    """

    def __init__(  # noqa: PLR0913 -- the parameters of Algorithm 2
        self,
        source: PairSource,
        size: int,
        objective: Objective,
        *,
        how: Choice = "draw",
        buffer: int = BUFFER,
        shares: tuple[float, ...] = SHARES,
        seed: int = 0,
    ) -> None:
        """Start before the first pair.

        Args:
            source: Pairs of the stream, by index.
            size: L, the most pairs to keep.
            objective: Constants of Eq 4.
            how: How to take pairs of a buffer.
            buffer: B.
            shares: b_j / B, ascending.
            seed: Seed of all random choices.
        """
        self._source, self._size, self._objective = source, size, objective
        self._how, self._buffer, self._shares, self._seed = how, buffer, shares, seed
        self.n_seen = 0
        self.selections: dict[float, Selection] = dict.fromkeys(shares, _NONE)
        self._members = {share: Members(objective.theta, source.n_dims) for share in shares}

    def resume(self, selections: dict[float, Selection], n_seen: int) -> None:
        """Continue from another instance's ``selections`` and ``n_seen``."""
        self.n_seen = n_seen
        self.selections = dict(selections)
        self._members = {
            share: members_of(self._source, self._objective, selection.indices)
            for share, selection in selections.items()
            if len(selection) <= self._size
        }

    def advance(self, n_come: int, *, is_end: bool = False) -> Iterator[int]:
        """Process pairs up to index ``n_come``; yield the number of new pairs after each buffer.

        Pairs that do not fill a buffer wait for the next call, unless ``is_end`` is set.
        """
        for batch in buffers(self.n_seen, n_come, self._buffer, is_end=is_end):
            self._take(batch, self._source.keys(batch))
            self.n_seen += len(batch)
            yield len(batch)

    def best(self) -> Selection:
        """Return the largest subset within the limit, or, below 0.6 L, the next larger one, cut.

        The next larger subset exceeds the limit. It is cut to L pairs at random (appendix B.1
        returns it whole). The result is empty before the first full buffer.
        """
        within = [s for s in self.selections.values() if len(s) <= self._size]
        beyond = [s for s in self.selections.values() if len(s) > self._size]
        largest = max(within, key=len, default=_NONE)
        if len(largest) > _ENOUGH * self._size or not beyond:
            return largest
        smallest = min(beyond, key=len)
        rng = np.random.default_rng(self._seed)
        kept = np.sort(rng.choice(len(smallest), self._size, replace=False))
        return Selection(smallest.indices[kept], smallest.weights[kept])

    def _take(self, batch: Indices, keys: Floats) -> None:
        values, p_lm = self._source.values[batch], self._source.p_lm[batch]
        for share in [s for s in self._shares if s in self._members]:
            n = round(share * len(batch))
            rng = np.random.default_rng((self._seed, self.n_seen, n))
            sums = self._members[share].sums(keys, values)
            taken, weights = choose(self._objective, p_lm, sums, n, self._how, rng)
            new = Selection(batch[taken], weights)
            self.selections[share] = _joined([self.selections[share], new])
            if len(self.selections[share]) > self._size:
                self._give_up(share)
            else:
                self._members[share].add(keys[taken], values[taken])

    def _give_up(self, share: float) -> None:
        """Stop adding to a subset; of the subsets given up, keep only the smallest."""
        del self._members[share]
        for larger in [s for s in self.selections if s > share and s not in self._members]:
            del self.selections[larger]


def online(source: PairSource, size: int, objective: Objective, **settings: object) -> Selection:
    """Run Algorithm 2 over a stream that has ended."""
    selecting = Online(source, size, objective, **settings)  # type: ignore[arg-type]
    for _ in selecting.advance(len(source.values), is_end=True):
        pass
    return selecting.best()


def members_of(source: PairSource, objective: Objective, indices: Indices) -> Members:
    """Return pairs of a full datastore as a subset."""
    members = Members(objective.theta, source.n_dims)
    if len(indices):
        members.add(source.keys(indices), source.values[indices])
    return members


def buffers(n_seen: int, n_come: int, size: int, *, is_end: bool) -> Iterator[Indices]:
    """Yield the indices ``n_seen`` to ``n_come`` in buffers; a partial one only if ``is_end``."""
    for start in range(n_seen, n_come, size):
        if start + size <= n_come or is_end:
            yield np.arange(start, min(start + size, n_come))


def _shares(size: int, rounds: int) -> list[int]:
    """Split ``size`` into ``rounds`` nearly equal parts."""
    edges = np.linspace(0, size, min(rounds, size) + 1).round().astype(int)
    return np.diff(edges).tolist()


def _chances(weights: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """Return probabilities proportional to the weights, at most 1 each, that sum to ``n``."""
    chances = np.ones(len(weights))
    is_certain = np.zeros(len(weights), np.bool_)
    while not is_certain.all():
        rest = weights * ~is_certain
        chances = np.where(is_certain, 1.0, rest * ((n - is_certain.sum()) / rest.sum()))
        if not (chances > 1).any():
            break
        is_certain |= chances >= 1
    return np.minimum(chances, 1.0)


def _drawn(
    chances: npt.NDArray[np.float64], n: int, rng: np.random.Generator
) -> npt.NDArray[np.intp]:
    """Draw ``n`` indices with these probabilities, by systematic sampling in random order."""
    order = rng.permutation(len(chances))
    steps = np.cumsum(chances[order]) * (n / chances.sum())
    marks = np.arange(n) + rng.random()
    return np.unique(order[np.minimum(np.searchsorted(steps, marks), len(order) - 1)])


def _joined(parts: list[Selection]) -> Selection:
    """Concatenate selections."""
    return Selection(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )
