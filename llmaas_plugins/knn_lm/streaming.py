"""Selection over a stream without an end.

Algorithm 2 takes fixed shares of every buffer, so sooner or later even its smallest subset is full,
and what comes after that is never seen. Drawn pairs have weights, which allows for less: one subset
takes all that comes until it is full; then it is thinned at random, what stays counts for more, and
from then on a smaller share of each buffer is drawn. It is full nearly always, and old pairs have
had the same chance as new ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmaas_plugins.knn_lm.objective import Members, Objective
from llmaas_plugins.knn_lm.selection import BUFFER, NONE, Selection, Source, buffers, choose, joined

__all__ = ["Stream"]

_THINNED = 0.8
"""Of the limit: what is left when it is exceeded."""


class Stream:
    """A selection that follows a stream.

    Attributes:
        selection: Pairs that are kept now, at most the limit.
        rate: Share of a buffer that is drawn.
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
        self.n_seen, self.rate, self.selection = 0, 1.0, NONE
        self._members = Members(objective.theta, source.n_dims)

    def resume(self, selection: Selection, rate: float, n_seen: int) -> None:
        """Go on from where another one was."""
        self.selection, self.rate, self.n_seen = selection, rate, n_seen
        self._read_members()

    def advance(self, n_come: int, *, is_end: bool = False) -> Iterator[int]:
        """Take the pairs up to ``n_come`` in; yields after each buffer how many were new.

        What does not fill a buffer is left for the next time, unless this is the end.
        """
        for batch in buffers(self.n_seen, n_come, self._buffer, is_end=is_end):
            rng = np.random.default_rng((self._seed, self.n_seen))
            keys, values = self._source.keys(batch), self._source.values[batch]
            sums = self._members.sums(keys, values)
            n = round(self.rate * len(batch))
            p_lm = self._source.p_lm[batch]
            taken, weights = choose(self._objective, p_lm, sums, n, "draw", rng)
            self.selection = joined([self.selection, Selection(batch[taken], weights)])
            self._members.add(keys[taken], values[taken])
            if len(self.selection) > self._size:
                self._thin(rng)
            self.n_seen += len(batch)
            yield len(batch)

    def _thin(self, rng: np.random.Generator) -> None:
        n = max(1, int(_THINNED * self._size))
        kept = n / len(self.selection)
        rows = np.sort(rng.choice(len(self.selection), n, replace=False))
        weights = (self.selection.weights[rows] / kept).astype(np.float32)
        self.selection = Selection(self.selection.indices[rows], weights)
        self.rate *= kept
        self._read_members()

    def _read_members(self) -> None:
        indices = self.selection.indices
        self._members = Members(self._objective.theta, self._source.n_dims)
        self._members.add(self._source.keys(indices), self._source.values[indices])
