"""Trust: whether the datastore knows the kind of text at hand, judged by the prompt.

Two experts predict each token of a text: the model, and the mixture. Trust is the mixture's share
in a Bayesian average of both, with a fading memory. After tokens y_1 ... y_n ::

    score  =  sum of decay^(n - i) * min(log(p_mix(y_i) / p_lm(y_i)), 1)
    trust  =  1 / (1 + exp(-score) (1 - prior) / prior)

Trust multiplies the mixture's weight. It is soon near 1 on text like the stored one, and near 0 on
other text, where even the nearest neighbors are unrelated. A single token that only the datastore
predicted may be chance, so the gain of one token is capped; the mixture itself limits the loss.

A reply's trust comes from the last tokens of its prompt, a fixed number whoever wrote them. A
token's gain, its part of the score, depends only on the tokens up to it and on the datastore.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Tokens

__all__ = [
    "LEAST_GAIN",
    "MOST_GAIN",
    "UNJUDGED",
    "PromptTrust",
    "Trust",
    "log_gain",
    "trust_before",
]

UNJUDGED = math.nan
"""Gain of a token that says nothing, because the model was sure and nothing was searched."""

_PRIOR = 0.25
_DECAY = 0.97
_LEAST_WEIGHT = 0.01
_LEAST_RATIO = 2.0**-20
"""Smallest probability ratio, as in the mixing: an alpha of 1 still leaves the model this share."""
LEAST_GAIN, MOST_GAIN = math.log(_LEAST_RATIO), 1.0
"""Bounds of a token's gain."""


class Trust:
    """Trust in the datastore for one text, updated token by token."""

    def __init__(self) -> None:
        """Start with the prior."""
        self._score = 0.0

    @property
    def weight(self) -> float:
        """Factor on the mixture's weight, at most 1; 0 if a search is not worth its time."""
        weight = 1 / (1 + math.exp(-self._score) * (1 - _PRIOR) / _PRIOR)
        return weight if weight >= _LEAST_WEIGHT else 0.0

    def observe(self, p_mix: float, p_lm: float) -> None:
        """Update with a token to which the mixture and the model gave these probabilities."""
        self.count(log_gain(p_mix, p_lm))

    def count(self, gain: float) -> None:
        """Update with a token of this gain (``log_gain``)."""
        self._score = _DECAY * self._score + gain


def log_gain(p_mix: float, p_lm: float) -> float:
    """Return the gain of a token: the bounded logarithm of the ratio of both probabilities."""
    return min(math.log(max(p_mix / p_lm, _LEAST_RATIO)), MOST_GAIN)


class PromptTrust:
    """Trust from the last tokens of one prompt, as they are evaluated or remembered.

    As long as all gains are known, the trust depends only on these tokens and the datastore. It
    does not depend on the division into batches or on whose cells precede the tokens. Tokens whose
    gain is not known are left out.
    """

    def __init__(self, text: Tokens, look_back: int) -> None:
        """Start without gains.

        Args:
            text: The prompt.
            look_back: Number of the prompt's last states to compare with the tokens that followed.
        """
        n_places = max(0, len(text) - 1)  # the token after the last is unknown yet
        self._n_text = len(text)
        self._first = min(max(0, len(text) - look_back), n_places)
        self._gains: list[float | None] = [None] * (n_places - self._first)
        self._trust: Trust | None = None
        self._has_given_up = False

    @property
    def trust(self) -> Trust:
        """The trust that the known gains have earned."""
        if self._trust is None:
            self._trust = Trust()
            for gain in () if self._has_given_up else self._gains:
                if gain is not None and not math.isnan(gain):
                    self._trust.count(gain)
        return self._trust

    @property
    def missing(self) -> list[int]:
        """Places of the looked-at states whose gains are not known, in order."""
        return [self._first + i for i, gain in enumerate(self._gains) if gain is None]

    def take(self, n_past: int, n_tokens: int, n_rows: int) -> list[int]:
        """Return the places of a batch's states that are to be compared with the next token.

        Args:
            n_past: Tokens evaluated before this batch.
            n_tokens: Tokens in the batch.
            n_rows: Rows of hidden states, for the batch's last tokens.
        """
        end = n_past + n_tokens
        if self._has_given_up or n_past >= self._n_text:
            return []
        if end > self._n_text:
            self.give_up()  # this is not the prompt's evaluation
            return []
        return [place for place in self.missing if max(n_past, end - n_rows) <= place < end]

    def give_up(self) -> None:
        """Return to the prior, because the states are not comparable."""
        self._has_given_up, self._trust = True, None

    def learn(self, place: int, gain: float) -> None:
        """Set the gain of the token after a place, or ``UNJUDGED``."""
        self._gains[place - self._first] = gain
        self._trust = None


def trust_before(
    p_mix: npt.NDArray[np.float32], p_lm: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return, for each token of a text, the trust that the tokens before it have earned."""
    trust, weights = Trust(), []
    for mixed, alone in zip(p_mix.tolist(), p_lm.tolist(), strict=True):
        weights.append(trust.weight)
        trust.observe(mixed, alone)
    return np.array(weights, np.float32)
