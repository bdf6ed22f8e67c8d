"""Whether the datastore knows the kind of text at hand, judged by what somebody else wrote of it.

Two experts bet on each token that comes: the model, and the mixture. Trust is the second one's
share in a Bayesian average of both, with a memory that fades: after tokens y_1 ... y_n ::

    score  =  sum of decay^(n - i) * min(log(p_mix(y_i) / p_lm(y_i)), 1)
    trust  =  1 / (1 + exp(-score) (1 - prior) / prior)

The weight of the mixture is multiplied by it. On text like the stored one it is soon near 1, on
other text near 0, where the nearest neighbours are near to nothing. A single token that only the
datastore foresaw may be chance, so what one can win is limited; what one can lose, the mixture
limits itself. Tokens that were sampled from the mixture say nothing about any of that, so a reply
is judged by its prompt.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Tokens, common_prefix

__all__ = ["Judged", "Memory", "Trust", "trust_before"]

_PRIOR = 0.25
_DECAY = 0.97
_MOST_LOG_RATIO = 1.0
_LEAST_WEIGHT = 0.01
_LEAST_RATIO = 2.0**-20
"""As in the mixing itself: an alpha of 1 leaves the model so much of a say."""
_REMEMBERED = 64
"""Texts: as many conversations as take turns on an engine."""


class Trust:
    """A text's, from its beginning on."""

    def __init__(self, score: float = 0.0) -> None:
        """The prior, unless something is known."""
        self._score = score

    def copy(self) -> Trust:
        """For a text that goes on with this one."""
        return Trust(self._score)

    @property
    def weight(self) -> float:
        """What the mixture's weight is multiplied by, up to 1; 0 if it is not worth a search."""
        weight = 1 / (1 + math.exp(-self._score) * (1 - _PRIOR) / _PRIOR)
        return weight if weight >= _LEAST_WEIGHT else 0.0

    def observe(self, p_mix: float, p_lm: float) -> None:
        """A token came that both had given these probabilities."""
        log_ratio = math.log(max(p_mix / p_lm, _LEAST_RATIO))
        self._score = _DECAY * self._score + min(log_ratio, _MOST_LOG_RATIO)


class Judged(NamedTuple):
    """A text, and what is known of it.

    Attributes:
        text: Its tokens.
        trust: After the last of them, once they have been judged.
        n_known: How many of them an earlier text had.
    """

    text: Tokens
    trust: Trust
    n_known: int


class Memory:
    """The texts that were judged last: a turn begins with what the one before it gave.

    So it does not matter whether its cells were evaluated again or restored.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._judged: deque[Judged] = deque(maxlen=_REMEMBERED)

    def begin(self, text: Tokens) -> Judged:
        """A text, with the trust of the longest one that it goes on with."""
        former = [one for one in self._judged if common_prefix(one.text, text) == len(one.text)]
        if not former:
            found = Judged(text, Trust(), 0)
        else:
            longest = max(former, key=lambda one: len(one.text))
            found = Judged(text, longest.trust.copy(), len(longest.text))
        self._judged.append(found)
        return found


def trust_before(
    p_mix: npt.NDArray[np.float32], p_lm: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Of each token of a text: the trust that the ones before it have given."""
    trust, weights = Trust(), []
    for mixed, alone in zip(p_mix.tolist(), p_lm.tolist(), strict=True):
        weights.append(trust.weight)
        trust.observe(mixed, alone)
    return np.array(weights, np.float32)
