"""Trust: whether the datastore knows the kind of text at hand, judged by the prompt.

Two experts predict each token of a text: the model, and the mixture. Trust is the mixture's share
in a Bayesian average of both, with a fading memory. After tokens y_1 ... y_n ::

    score  =  sum of decay^(n - i) * min(log(p_mix(y_i) / p_lm(y_i)), 1)
    trust  =  1 / (1 + exp(-score) (1 - prior) / prior)

Trust multiplies the mixture's weight. It is soon near 1 on text like the stored one, and near 0 on
other text, where even the nearest neighbors are unrelated. A single token that only the datastore
predicted may be chance, so the gain of one token is capped; the mixture itself limits the loss.

A reply's trust comes from the last tokens of its prompt, a fixed number whoever wrote them. Nothing
is carried over between requests, so the same prompt has the same trust after a restart.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Tokens

__all__ = ["PromptTrust", "Trust", "trust_before"]

_PRIOR = 0.25
_DECAY = 0.97
_MOST_LOG_RATIO = 1.0
_LEAST_WEIGHT = 0.01
_LEAST_RATIO = 2.0**-20
"""Smallest probability ratio, as in the mixing: an alpha of 1 still leaves the model this share."""


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
        log_ratio = math.log(max(p_mix / p_lm, _LEAST_RATIO))
        self._score = _DECAY * self._score + min(log_ratio, _MOST_LOG_RATIO)


class PromptTrust:
    """Trust from the last tokens of one prompt, as they are evaluated batch by batch.

    The trust depends only on these tokens and the datastore. It does not depend on the division
    into batches, on whose cells precede the tokens, or on earlier requests.
    """

    def __init__(self, text: Tokens, look_back: int) -> None:
        """Start without observations.

        Args:
            text: The prompt.
            look_back: Number of the prompt's last states to compare with the tokens that followed.
        """
        self._text = text
        self._next = max(0, len(text) - look_back)
        self._trust: Trust | None = Trust()

    @property
    def trust(self) -> Trust:
        """The trust; the prior unless all of the prompt's last tokens were seen."""
        is_whole = self._trust is not None and self._next == len(self._text)
        return self._trust if self._trust and is_whole else Trust()

    def take(self, n_past: int, n_tokens: int, n_rows: int) -> list[tuple[int, int]]:
        """Process a batch; return rows to compare, counted from the last, with their next tokens.

        Args:
            n_past: Tokens evaluated before this batch.
            n_tokens: Tokens in the batch.
            n_rows: Rows of hidden states, for the batch's last tokens.
        """
        start, end = max(n_past, self._next), n_past + n_tokens
        if self._trust is None or start >= end or self._next == len(self._text):
            return []
        if start != self._next or end - start > n_rows or end > len(self._text):
            self._trust = None  # tokens were skipped, or this is not the prompt's evaluation
            return []
        self._next = end
        # the token after the last is unknown yet
        next_tokens = self._text[start + 1 : end + 1].tolist()
        return [(end - 1 - start - i, token) for i, token in enumerate(next_tokens)]

    def give_up(self) -> None:
        """Return to the prior, because the states are not comparable."""
        self._trust = None

    def observe(self, p_mix: float, p_lm: float) -> None:
        """Update with the next of the tokens that ``take`` returned."""
        if self._trust is not None:
            self._trust.observe(p_mix, p_lm)


def trust_before(
    p_mix: npt.NDArray[np.float32], p_lm: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return, for each token of a text, the trust that the tokens before it have earned."""
    trust, weights = Trust(), []
    for mixed, alone in zip(p_mix.tolist(), p_lm.tolist(), strict=True):
        weights.append(trust.weight)
        trust.observe(mixed, alone)
    return np.array(weights, np.float32)
