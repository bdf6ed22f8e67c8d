"""Which pairs to keep (§4): Algorithm 1 over the full datastore, Algorithm 2 over a stream.

Both look at batches of pairs, bound what each would add to the subset chosen so far (Eq 8), and
take some of the batch. The paper takes those with the highest bound (``"top"``). By default pairs
are *drawn* here, in proportion to -log p(y|x, S), the loss that §4.2 identifies the bound with: a
subset of the hardest pairs alone says too little of what is usual. A pair that was unlikely to be
drawn stands for others like it, so it counts as one over its chance (its weight).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.objective import Members, Objective

__all__ = [
    "BUFFER",
    "Choice",
    "Online",
    "Selection",
    "Source",
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
"""B over b of Algorithm 1."""
BUFFER = 10_000
"""B of Algorithm 2."""
SHARES = (0.1, 0.2, 0.4, 0.8, 1.0)
"""b_j over B of Algorithm 2: growing twofold, and all."""
_ENOUGH = 0.6
"""A candidate subset below this share of the limit is not returned (appendix B.1)."""


class Source(Protocol):
    """A full datastore to select from.

    Attributes:
        values: Targets of its pairs, shape (n,).
        p_lm: The model's probabilities of these.
        n_dims: Numbers in a key.
    """

    values: Ints
    p_lm: Floats
    n_dims: int

    def keys(self, indices: Indices) -> Floats:
        """Keys of some pairs, shape (len(indices), n_dims)."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Pairs that were kept.

    Attributes:
        indices: Which, shape (n,).
        weights: For how many each stands, above 0.
    """

    indices: Indices
    weights: Floats

    def __len__(self) -> int:
        """How many."""
        return len(self.indices)


_NONE = Selection(np.empty(0, np.int64), np.empty(0, np.float32))


def offline(  # noqa: PLR0913 -- Algorithm 1 has as many
    source: Source,
    size: int,
    objective: Objective,
    *,
    how: Choice = "draw",
    rounds: int = ROUNDS,
    candidates: int = CANDIDATES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _n: None,
) -> Selection:
    """Algorithm 1: in each of T rounds, b of B pairs that are picked at random from the rest.

    It takes O(B T) bounds, whatever the size of the full datastore. What ``progress`` raises ends
    it between two rounds.

    Args:
        source: The full datastore.
        size: L, the most pairs to keep.
        objective: Constants of Eq 4.
        how: How a round's pairs are taken.
        rounds: T.
        candidates: B over b.
        seed: Of all chance.
        progress: Told after each round how many pairs have been taken in it.
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


def choose(  # noqa: PLR0913, PLR0917 -- one step of both algorithms
    objective: Objective,
    p_lm: Floats,
    sums: Floats,
    n: int,
    how: Choice,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.intp], Floats]:
    """``n`` of a batch's pairs, and their weights.

    Args:
        objective: Constants of Eq 4.
        p_lm: The model's probability of each target.
        sums: ``Members.sums`` of the batch.
        n: How many; all if there are no more.
        how: By the highest bounds, or drawn.
        rng: For draws.
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
    """Algorithm 2: h subsets of a stream whose length nobody knows, a buffer of B pairs at a time.

    Each takes another share of every buffer; one that outgrows the limit is given up. It can stop
    after any pair: ``selections`` and ``n_seen`` are all there is to go on from.
    """

    def __init__(  # noqa: PLR0913 -- Algorithm 2 has as many
        self,
        source: Source,
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
            source: Where the stream's pairs are: they have come up to an index.
            size: L, the most pairs to keep.
            objective: Constants of Eq 4.
            how: How a buffer's pairs are taken.
            buffer: B.
            shares: b_j over B, ascending.
            seed: Of all chance.
        """
        self._source, self._size, self._objective = source, size, objective
        self._how, self._buffer, self._shares, self._seed = how, buffer, shares, seed
        self.n_seen = 0
        self.selections: dict[float, Selection] = dict.fromkeys(shares, _NONE)
        self._members = {share: Members(objective.theta, source.n_dims) for share in shares}

    def resume(self, selections: dict[float, Selection], n_seen: int) -> None:
        """Go on from where another one was."""
        self.n_seen = n_seen
        self.selections = dict(selections)
        self._members = {
            share: members_of(self._source, self._objective, selection.indices)
            for share, selection in selections.items()
            if len(selection) <= self._size
        }

    def advance(self, n_come: int, *, is_end: bool = False) -> Iterator[int]:
        """Take the pairs up to ``n_come`` in; yields after each buffer how many were new.

        What does not fill a buffer is left for the next time, unless this is the end.
        """
        for batch in buffers(self.n_seen, n_come, self._buffer, is_end=is_end):
            self._take(batch, self._source.keys(batch))
            self.n_seen += len(batch)
            yield len(batch)

    def best(self) -> Selection:
        """The largest subset within the limit, unless it is below 0.6 L: then the next larger one.

        That one has outgrown the limit, by less than a buffer, or would be all that has come; it is
        cut at random (appendix B.1 returns it whole). Before any buffer is full it is empty.
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
        """Stop at what it has; of those that were given up only the last is of use."""
        del self._members[share]
        for larger in [s for s in self.selections if s > share and s not in self._members]:
            del self.selections[larger]


def online(source: Source, size: int, objective: Objective, **settings: object) -> Selection:
    """Algorithm 2 over a stream that has ended."""
    selecting = Online(source, size, objective, **settings)  # type: ignore[arg-type]
    for _ in selecting.advance(len(source.values), is_end=True):
        pass
    return selecting.best()


def members_of(source: Source, objective: Objective, indices: Indices) -> Members:
    """Pairs of a full datastore, as a subset."""
    members = Members(objective.theta, source.n_dims)
    if len(indices):
        members.add(source.keys(indices), source.values[indices])
    return members


def buffers(n_seen: int, n_come: int, size: int, *, is_end: bool) -> Iterator[Indices]:
    """A stream's pairs from ``n_seen`` to ``n_come``, a buffer at a time; the rest at the end."""
    for start in range(n_seen, n_come, size):
        if start + size <= n_come or is_end:
            yield np.arange(start, min(start + size, n_come))


def _shares(size: int, rounds: int) -> list[int]:
    """``size`` in ``rounds`` parts."""
    edges = np.linspace(0, size, min(rounds, size) + 1).round().astype(int)
    return np.diff(edges).tolist()


def _chances(weights: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """Chances in proportion to the weights, none above 1, that add up to ``n``."""
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
    """``n`` drawn with these chances: systematic sampling in random order."""
    order = rng.permutation(len(chances))
    steps = np.cumsum(chances[order]) * (n / chances.sum())
    marks = np.arange(n) + rng.random()
    return np.unique(order[np.minimum(np.searchsorted(steps, marks), len(order) - 1)])


def _joined(parts: list[Selection]) -> Selection:
    """Several, one after the other."""
    return Selection(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )
