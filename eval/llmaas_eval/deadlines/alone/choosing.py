"""Choices of a setting on one half of the questions, judged on the other half, both ways round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.deadlines.loaded.scoring import Pair, Scores

__all__ = ["Judge", "Judged"]

Values = NDArray[np.float64]


class Judged(NamedTuple):
    """Answers to all questions, each by a setting that was not chosen on it.

    Attributes:
        settings: Setting for the even questions, and for the odd ones; empty if it differs by
            question.
        agrees: Whether the choice is the whole model's.
        right: Whether it is the right one.
        nats: Mean -log p of the right choice's tokens.
    """

    settings: Sequence[Pair]
    agrees: Values
    right: Values
    nats: Values


class Judge:
    """Judges answers to a set by the whole model's answers and the right ones."""

    def __init__(self, whole: Scores, right: Sequence[int]) -> None:
        """Take the whole model's answers, and the right choices."""
        self._whole, self._right = whole.choice, np.array(right)

    def of(self, scores: Scores, settings: Sequence[Pair]) -> Judged:
        """Judge the answers of one setting."""
        agrees, right = (scores.choice == one for one in (self._whole, self._right))
        nats = scores.nats.astype(np.float64)
        return Judged(settings, agrees.astype(np.float64), right.astype(np.float64), nats)

    def chosen(self, by_pair: Mapping[Pair, Scores], feasible: Sequence[Pair]) -> Judged | None:
        """Judge the setting that agrees most on the other half; None if no setting is feasible.

        If several agree equally often, the one with the likeliest right answers counts.
        """
        if not feasible:
            return None
        found = {pair: self.of(by_pair[pair], [pair]) for pair in feasible}
        is_odd = np.arange(len(self._right)) % 2 == 1
        even, odd = (max(feasible, key=_worth(found, half)) for half in (is_odd, ~is_odd))
        parts = (
            np.where(is_odd, found[odd][i], found[even][i]) for i in range(1, len(Judged._fields))
        )
        return Judged([even, odd], *parts)

    def random(self, by_pair: Mapping[Pair, Scores], feasible: Sequence[Pair]) -> Judged | None:
        """Return the mean over all feasible settings."""
        return self._over(by_pair, feasible, np.mean, np.mean)

    def best(self, by_pair: Mapping[Pair, Scores], feasible: Sequence[Pair]) -> Judged | None:
        """Return the best over all feasible settings, for each question apart."""
        return self._over(by_pair, feasible, np.max, np.min)

    def _over(
        self,
        by_pair: Mapping[Pair, Scores],
        feasible: Sequence[Pair],
        of_hits: Callable[..., Values],
        of_nats: Callable[..., Values],
    ) -> Judged | None:
        if not feasible:
            return None
        found = [self.of(by_pair[pair], [pair]) for pair in feasible]
        agrees, right = (of_hits([one[i] for one in found], axis=0) for i in (1, 2))
        return Judged([], agrees, right, of_nats([one.nats for one in found], axis=0))


# -- inside --------------------------------------------------------------------------------------


def _worth(
    found: Mapping[Pair, Judged], half: NDArray[np.bool_]
) -> Callable[[Pair], tuple[float, float]]:
    """Return a function that orders settings by their answers to a half of the questions."""

    def worth(pair: Pair) -> tuple[float, float]:
        one = found[pair]
        return float(one.agrees[half].mean()), -float(one.nats[half].mean())

    return worth
