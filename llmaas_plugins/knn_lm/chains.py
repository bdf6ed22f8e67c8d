"""What is foreseen from a match, and how far such foresight is to be trusted."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from llmaas_plugins.knn_lm.suffixes import LONGEST, Match

__all__ = ["Chain", "Trust", "chain_of"]

_Place = tuple[int, int]
_LEAST = 0.02
"""Chance that a chain comes true so far, below which no more votes are taken."""
_PRIOR = 4.0
_FIRST_TRUST = (0.6, 0.8, 0.9)
"""Of votes of 1, 2, and 4 or more rows, while nothing is known: as if seen four times each."""
_MEMORY = 256.0
"""Votes in a place after which what was seen before counts less than a third."""


class Chain(NamedTuple):
    """What is foreseen.

    Attributes:
        tokens: In order.
        votes: For each of the first of them, where its vote counts, and its share in it.
        chances: Of each of these, after those before it.
    """

    tokens: list[int]
    votes: list[tuple[_Place, float]]
    chances: list[float]


class Trust:
    """How often the winner of a vote came true, to its share in the vote.

    Counted apart for matches of 1, 2, 4, 8, ... tokens, and votes of 1, 2, and 4 or more rows: one
    occurrence of a few tokens promises least, many that agree promise most.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seen: dict[_Place, tuple[float, float]] = {}

    def place(self, length: int, n_rows: int) -> _Place:
        """Where a vote of so many rows, after a match so long, counts."""
        return min(length, LONGEST).bit_length(), min(n_rows, 4).bit_length()

    def chance(self, place: _Place, share: float) -> float:
        """That the winner of a vote comes true, given its share."""
        hits, shares = self._seen.get(place) or self._prior(place)
        chance = share * hits / shares
        return min(1.0, chance)

    def learn(self, chain: Chain, said: list[int]) -> None:
        """Count the votes up to the first that did not come true."""
        steps = zip(chain.tokens, chain.votes, said, strict=False)
        for token, (place, share), truth in steps:
            hits, shares = self._seen.get(place) or self._prior(place)
            fades = _MEMORY / (_MEMORY + share)  # what is long ago counts less and less
            self._seen[place] = (hits + (token == truth)) * fades, (shares + share) * fades
            if token != truth:
                break

    def _prior(self, place: _Place) -> tuple[float, float]:
        length, n_rows = place
        return _PRIOR * _FIRST_TRUST[n_rows - 1] * (0.5 if length == 1 else 1.0), _PRIOR


def chain_of(match: Match, trust: Trust) -> Chain:
    """Follow the majority of a match's rows, and of those that went the same way.

    What is unlikely to be reached is taken from one of them, without a vote: it may fill a batch.
    """
    chain = Chain([], [], [])
    rows, reached = match.rows, 1.0
    while rows := [row for row in rows if len(row) > len(chain.tokens)]:
        step = len(chain.tokens)
        if reached < _LEAST:
            chain.tokens.extend(rows[0][step:])
            break
        place, share, token = trust.place(match.length + step, len(rows)), 1.0, rows[0][step]
        if len(rows) > 1:
            votes = Counter([row[step] for row in rows])
            token = max(votes, key=votes.__getitem__)
            share = votes[token] / len(rows)
            rows = [row for row in rows if row[step] == token]
        chance = trust.chance(place, share)
        reached *= chance
        chain.tokens.append(token)
        chain.votes.append((place, share))
        chain.chances.append(chance)
    return chain
