"""Drafts by a narrow level, for a model whose other weights are read from a file for every token.

Memory keeps the narrow level first, so that its own tokens read nothing. The whole model then
verifies several tokens while it reads its weights once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Guess, Proposal
from llmaas_plugins.elastic.contexts import ElasticContext
from llmaas_plugins.elastic.level_drafts import LevelDrafts

__all__ = ["LevelDrafter"]

MOST = 7
"""Most tokens of a draft: with the token before them, they fill two groups of the kernels' rows."""
_WHOLE = 0


class _Made(NamedTuple):
    """Draft that was made.

    Attributes:
        level: Index of the level that made it.
        n_before: Tokens of the text before it.
        tokens: Its tokens.
        owns: Probability that the level gave each of them.
        seconds: Time that it took.
    """

    level: int
    n_before: int
    tokens: list[int]
    owns: list[float]
    seconds: float


class LevelDrafter:
    """Drafter of one request."""

    most = MOST

    def __init__(self, context: ElasticContext, drafts: LevelDrafts, guess: Guess) -> None:
        """Make drafts for the request that ``context`` serves."""
        self._context, self._drafts, self._guess = context, drafts, guess
        self._made: _Made | None = None
        self._n_tokens: int | None = None
        self._longer_s = 0.0

    def propose(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> Proposal | None:
        """Return the draft of the level that memory keeps, if drafts pay."""
        drafts, native = self._drafts, self._context.native
        with drafts.lock:
            self._learn(tokens, seconds)
            if native.level != _WHOLE or native.sparse_tokens:
                return None
            level = drafts.prepare(native.file_weights())
            gain = drafts.worth.gain
        if level is None:
            return None
        self._longer_s = _slope(seconds)
        return Proposal(1.01 if gain is None else gain, partial(self._make, level, len(tokens)))

    # -- inside ---------------------------------------------------------------------------------

    def _learn(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> None:
        """Learn from what the model said since the last call."""
        made, self._made = self._made, None
        before, self._n_tokens = self._n_tokens, len(tokens)
        if before is None:
            self._drafts.begin()
        elif made is None:
            weights = self._context.native.file_weights()
            self._drafts.passed(weights, max(0, len(tokens) - before), seconds)
        else:
            n_kept = _common(made.tokens, tokens[made.n_before :].tolist())
            verify_s = seconds.get(len(made.tokens) + 1, 0.0)
            self._drafts.drafted(made.level, n_kept, made.owns, made.seconds + verify_s)

    def _make(self, level: int, n_before: int) -> list[int]:
        """Let the narrow level say tokens, until the next one would not pay for its time.

        Another context of the model may choose another level meanwhile.
        """
        trust, worth, owns = self._drafts.trusts[level], self._drafts.worth, []
        chance, began = 1.0, time.perf_counter()

        def pick(logits: NDArray[np.float32]) -> tuple[int, bool]:
            nonlocal chance
            token = int(logits.argmax())
            owns.append(float(1 / np.exp(logits - logits[token]).sum()))
            chance *= trust.chance(owns[-1])
            longer_s = (time.perf_counter() - began) / len(owns) + self._longer_s
            is_worth = chance * trust.mean > longer_s * worth.least_chance_a_s
            return token, is_worth or worth.is_warming_up

        tokens = self._guess(level, self.most, pick)
        self._made = _Made(level, n_before, tokens, owns, time.perf_counter() - began)
        return tokens


def _slope(seconds: Mapping[int, float]) -> float:
    """Return the seconds that one more token adds to a batch; 0 if that is unknown."""
    largest = max(seconds, default=1)
    if 1 not in seconds or largest == 1:
        return 0.0
    return max(0.0, (seconds[largest] - seconds[1]) / (largest - 1))


def _common(drafted: Sequence[int], said: Sequence[int]) -> int:
    """Return how many of the first drafted tokens were said."""
    n = 0
    while n < min(len(drafted), len(said)) and drafted[n] == said[n]:
        n += 1
    return n
