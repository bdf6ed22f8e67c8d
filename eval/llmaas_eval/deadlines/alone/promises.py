"""Promises, and the settings of prompt and answer that keep them by a profile's measured times.

Limits are shares of the whole model's times for the same prompt, which is evaluated whole (cold),
as in ElastiLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.deadlines.loaded.scoring import Pair
from llmaas_plugins.elastic.latency import Latency

__all__ = [
    "APART",
    "N_ANSWER",
    "TOGETHER",
    "Promise",
    "Times",
    "apart",
    "feasible",
    "times_of",
    "together",
    "widest",
]

APART, TOGETHER = "first token and further tokens", "whole answer"
N_ANSWER = 24
"""Tokens of an answer whose whole time is limited, with the first: the mean of the traces."""
_MOSTLY = 0.95
_ROUNDING = 1e-9


class Times(NamedTuple):
    """Measured times of a set's prompts; shape ``(n_levels, n_prompts)`` each.

    Attributes:
        first_ms: Time to the first token.
        further_ms: Time of each further token.
    """

    first_ms: NDArray[np.float64]
    further_ms: NDArray[np.float64]

    def answer_ms(self, pair: Pair) -> NDArray[np.float64]:
        """Return the time of each whole answer at a setting."""
        prompt, answer = pair
        return self.first_ms[prompt] + (N_ANSWER - 1) * self.further_ms[answer]


class Promise(NamedTuple):
    """Limits of a request, as shares of the whole model's times.

    Attributes:
        kind: ``APART``, or ``TOGETHER`` for one limit on the time of the whole answer.
        first: Limit of the time to the first token, or of the whole answer.
        further: Limit of the time of each further token; unused for the whole answer.
    """

    kind: str
    first: float
    further: float

    def is_kept(self, times: Times, pair: Pair) -> NDArray[np.bool_]:
        """Return for each prompt whether a setting keeps the promise."""
        if self.kind == TOGETHER:
            return _fits(times.answer_ms(pair), self.first * times.answer_ms((0, 0)))
        prompt, answer = pair
        is_first_kept = _fits(times.first_ms[prompt], self.first * times.first_ms[0])
        return is_first_kept & _fits(times.further_ms[answer], self.further * times.further_ms[0])


def apart(firsts: Sequence[float], furthers: Sequence[float]) -> list[Promise]:
    """Return a grid of limits for the first and for further tokens."""
    return [Promise(APART, first, further) for first in firsts for further in furthers]


def together(shares: Sequence[float]) -> list[Promise]:
    """Return limits of the time of the whole answer."""
    return [Promise(TOGETHER, share, share) for share in shares]


def times_of(latency: Latency, lengths: Sequence[int]) -> Times:
    """Return a profile's times for prompts of these numbers of tokens."""
    most, least = latency.threads[-1], latency.threads[0]
    first = [[latency.ttft_ms(level, n, most) for n in lengths] for level in latency.levels]
    further = [[latency.tpot_ms(level, n, least) for n in lengths] for level in latency.levels]
    return Times(np.array(first), np.array(further))


def feasible(promise: Promise, times: Times, settings: Sequence[Pair]) -> list[Pair]:
    """Return the settings that keep a promise for at least 95 % of the prompts.

    Args:
        promise: Promise to keep.
        times: Times of the prompts.
        settings: Pairs of indices of levels.
    """
    return [pair for pair in settings if promise.is_kept(times, pair).mean() >= _MOSTLY]


def widest(possible: Sequence[Pair]) -> Pair | None:
    """Return the feasible setting whose levels are the widest; None if there is none.

    If several are as wide, it is the one with the widest prompt.
    """
    return min(possible, key=lambda pair: (sum(pair), pair), default=None)


# -- inside --------------------------------------------------------------------------------------


def _fits(ms: NDArray[np.float64], most_ms: NDArray[np.float64]) -> NDArray[np.bool_]:
    return ms <= most_ms * (1 + _ROUNDING)
