"""Whether the datastore knows the kind of text at hand, judged by what somebody else wrote of it.

Two experts bet on each token that comes: the model, and the mixture. Trust is the second one's
share in a Bayesian average of both, with a memory that fades: after tokens y_1 ... y_n ::

    score  =  sum of decay^(n - i) * min(log(p_mix(y_i) / p_lm(y_i)), 1)
    trust  =  1 / (1 + exp(-score) (1 - prior) / prior)

The weight of the mixture is multiplied by it. On text like the stored one it is soon near 1, on
other text near 0, where the nearest neighbours are near to nothing. A single token that only the
datastore foresaw may be chance, so what one can win is limited; what one can lose, the mixture
limits itself. A reply is judged by its prompt: the last tokens of it, always as many, whoever
wrote them. Nothing is remembered from one request to the next, so the same prompt has the same
trust after a restart, too.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llmaas_hooks import Tokens

__all__ = ["Judgment", "Trust", "trust_before"]

_PRIOR = 0.25
_DECAY = 0.97
_MOST_LOG_RATIO = 1.0
_LEAST_WEIGHT = 0.01
_LEAST_RATIO = 2.0**-20
"""As in the mixing itself: an alpha of 1 leaves the model so much of a say."""


class Trust:
    """The trust in the datastore for one text, token by token."""

    def __init__(self) -> None:
        """Begin with the prior."""
        self._score = 0.0

    @property
    def weight(self) -> float:
        """What the mixture's weight is multiplied by, up to 1; 0 if it is not worth a search."""
        weight = 1 / (1 + math.exp(-self._score) * (1 - _PRIOR) / _PRIOR)
        return weight if weight >= _LEAST_WEIGHT else 0.0

    def observe(self, p_mix: float, p_lm: float) -> None:
        """A token came that both had given these probabilities."""
        log_ratio = math.log(max(p_mix / p_lm, _LEAST_RATIO))
        self._score = _DECAY * self._score + min(log_ratio, _MOST_LOG_RATIO)


class Judgment:
    """The trust that the last tokens of one prompt give, as they are evaluated batch by batch.

    It depends on these tokens and the datastore alone. So it does not matter in which batches they
    are evaluated, whose cells come before them, or what the process was asked before.
    """

    def __init__(self, text: Tokens, look_back: int) -> None:
        """Know nothing yet.

        Args:
            text: The prompt.
            look_back: How many of its last states are compared with the token that came next.
        """
        self._text = text
        self._next = max(0, len(text) - look_back)
        self._trust: Trust | None = Trust()

    @property
    def trust(self) -> Trust:
        """The trust; the prior if not all of these tokens were seen."""
        is_whole = self._trust is not None and self._next == len(self._text)
        return self._trust if self._trust and is_whole else Trust()

    def take(self, n_past: int, n_tokens: int, n_rows: int) -> list[tuple[int, int]]:
        """Take a batch in; return which of its rows, counted from the last, say which tokens.

        Args:
            n_past: Tokens evaluated before.
            n_tokens: Tokens in the batch.
            n_rows: How many of the last ones have a row.
        """
        start, end = max(n_past, self._next), n_past + n_tokens
        if self._trust is None or start >= end or self._next == len(self._text):
            return []
        if start != self._next or end - start > n_rows or end > len(self._text):
            self._trust = None  # some were not seen: another evaluation than that of the prompt
            return []
        self._next = end
        said = self._text[start + 1 : end + 1].tolist()  # nobody knows yet what follows the last
        return [(end - 1 - start - i, token) for i, token in enumerate(said)]

    def give_up(self) -> None:
        """Keep the prior: the states are not comparable."""
        self._trust = None

    def observe(self, p_mix: float, p_lm: float) -> None:
        """Count the next of the tokens that ``take`` returned."""
        if self._trust is not None:
            self._trust.observe(p_mix, p_lm)


def trust_before(
    p_mix: npt.NDArray[np.float32], p_lm: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Of each token of a text: the trust that the ones before it have given."""
    trust, weights = Trust(), []
    for mixed, alone in zip(p_mix.tolist(), p_lm.tolist(), strict=True):
        weights.append(trust.weight)
        trust.observe(mixed, alone)
    return np.array(weights, np.float32)
