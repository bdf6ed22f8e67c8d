"""Prediction of the tokens that follow a match, and how often such predictions come true."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from llmaas_plugins.knn_lm.drafts.suffix_array import LONGEST, SuffixMatch

__all__ = ["AcceptanceRates", "Continuation", "continue_match"]

_Place = tuple[int, int]
_LEAST = 0.02
"""Chance of reaching a token of the chain, below which no further votes are taken."""
_PRIOR = 4.0
_PRIOR_RATES = (0.6, 0.8, 0.9)
"""Initial rates for votes of 1, 2, and 4 or more rows, with the weight of four observed votes."""
_MEMORY = 256.0
"""Votes in a place after which earlier observations have less than a third of their weight."""


class Continuation(NamedTuple):
    """Predicted tokens.

    Attributes:
        tokens: Predicted tokens in order.
        votes: For each of the first tokens, the place where its vote is counted, and the winner's
            share of the vote.
        chances: Probability of each of these tokens, given the tokens before it.
    """

    tokens: list[int]
    votes: list[tuple[_Place, float]]
    chances: list[float]


class AcceptanceRates:
    """Observed frequency with which the winner of a vote came true, relative to its share.

    Votes are counted separately for matches of 1, 2–3, 4–7, 8–15, … tokens and for votes of 1, 2–3,
    and 4 or more rows. One occurrence of a few tokens is the weakest evidence; many rows that agree
    are the strongest.
    """

    def __init__(self) -> None:
        """Start without observations."""
        self._seen: dict[_Place, tuple[float, float]] = {}

    def place(self, length: int, n_rows: int) -> _Place:
        """Return the counter for votes of ``n_rows`` rows after a match of ``length`` tokens."""
        return min(length, LONGEST).bit_length(), min(n_rows, 4).bit_length()

    def chance(self, place: _Place, share: float) -> float:
        """Estimate the probability that the winner of a vote comes true, given its share."""
        hits, shares = self._seen.get(place) or self._prior(place)
        chance = share * hits / shares
        return min(1.0, chance)

    def learn(self, continuation: Continuation, new_tokens: list[int]) -> None:
        """Count the votes up to and including the first that did not come true."""
        steps = zip(continuation.tokens, continuation.votes, new_tokens, strict=False)
        for token, (place, share), truth in steps:
            hits, shares = self._seen.get(place) or self._prior(place)
            fades = _MEMORY / (_MEMORY + share)  # give older observations less and less weight
            self._seen[place] = (hits + (token == truth)) * fades, (shares + share) * fades
            if token != truth:
                break

    def _prior(self, place: _Place) -> tuple[float, float]:
        length, n_rows = place
        return _PRIOR * _PRIOR_RATES[n_rows - 1] * (0.5 if length == 1 else 1.0), _PRIOR


def continue_match(match: SuffixMatch, rates: AcceptanceRates) -> Continuation:
    """Follow the majority of a match's rows, dropping rows that went another way.

    When the continuation has become unlikely, append the rest of one row without a vote: those
    tokens may fill a batch.
    """
    continuation = Continuation([], [], [])
    rows, reached = match.rows, 1.0
    while rows := [row for row in rows if len(row) > len(continuation.tokens)]:
        step = len(continuation.tokens)
        if reached < _LEAST:
            continuation.tokens.extend(rows[0][step:])
            break
        place, share, token = rates.place(match.length + step, len(rows)), 1.0, rows[0][step]
        if len(rows) > 1:
            votes = Counter([row[step] for row in rows])
            token = max(votes, key=votes.__getitem__)
            share = votes[token] / len(rows)
            rows = [row for row in rows if row[step] == token]
        chance = rates.chance(place, share)
        reached *= chance
        continuation.tokens.append(token)
        continuation.votes.append((place, share))
        continuation.chances.append(chance)
    return continuation
