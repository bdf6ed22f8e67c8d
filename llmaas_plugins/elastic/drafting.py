"""Drafts by a narrow level, for a model whose other weights are read from a file for every token.

Memory keeps the narrow level first, so that its own tokens read nothing. The whole model then
verifies several tokens while it reads its weights once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import FileWeights, Guess, Proposal
from llmaas_plugins.elastic.contexts import ElasticContext
from llmaas_plugins.elastic.draft_worth import Phase, Trust, Worth

__all__ = ["LevelDrafter", "LevelDrafts"]

MOST = 7
"""Most tokens of a draft: with the token before them, they fill two groups of the kernels' rows."""
_WHOLE = 0
_SPARE = 0.02
"""Share of a level's bytes that must be left for it to be chosen, but not for it to stay."""
_NO_ROOM = "the narrowest level takes {} MiB, but {} MiB of weights may be kept"


@dataclass(slots=True)
class LevelDrafts:
    """Drafts of one model: the level that makes them, and what is known about it.

    Attributes:
        levels: Levels of the model, widest first.
        level: Index of the level that memory keeps first; None if there is none.
        obstacle: Why there are no drafts; None if nothing prevents them.
        trust: How likely drafted tokens are kept.
        worth: Whether drafts pay.
        proposed: Tokens proposed so far.
        accepted: Proposed tokens that the whole model kept.
        passes: Drafts so far.
    """

    levels: Sequence[float]
    level: int | None = None
    obstacle: str | None = None
    trust: Trust = field(default_factory=Trust)
    worth: Worth = field(default_factory=Worth)
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    def prepare(self, weights: FileWeights) -> bool:
        """Keep a level first while drafts are made, else none; return whether one is kept.

        The call may wait for the batch that is being evaluated.
        """
        if self.worth.phase is not Phase.DRAFTING:
            self._keep(weights, None)
            return False
        self.obstacle = None
        self._keep(weights, self._fitting(weights, weights.stats()["room_bytes"]))
        if self.level is None:
            self.worth.rest()
        return self.level is not None

    def report(self) -> dict[str, Any]:
        """Return the level, whether drafts pay, and the counts."""
        return {
            "level": None if self.level is None else self.levels[self.level],
            "phase": self.worth.phase.name.lower(),
            "gain": self.worth.gain,
            "obstacle": self.obstacle,
            "passes": self.passes,
            "proposed": self.proposed,
            "accepted": self.accepted,
        }

    def _fitting(self, weights: FileWeights, room: int) -> int | None:
        """Return the widest narrow level that fits into ``room`` bytes, or the present one."""
        if self.level is not None and self._size(weights, self.level) <= room:
            return self.level
        for level in range(1, len(self.levels)):
            if self._size(weights, level) * (1 + _SPARE) <= room:
                return level
        smallest = min(self._sizes.values(), default=0)
        self.obstacle = _NO_ROOM.format(smallest >> 20, room >> 20)
        return None

    def _size(self, weights: FileWeights, level: int) -> int:
        """Return the bytes that a level takes; the first time, it is chosen to find out."""
        if level not in self._sizes:
            self._keep(weights, level)
            self._sizes[level] = weights.stats()["level_bytes"]
        return self._sizes[level]

    def _keep(self, weights: FileWeights, level: int | None) -> None:
        if level != self.level:
            weights.keep_level(level)
            self.level = level


class _Made(NamedTuple):
    """Draft that was made.

    Attributes:
        n_before: Tokens of the text before it.
        tokens: Its tokens.
        owns: Probability that the level gave each of them.
        seconds: Time that it took.
    """

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
        self._learn(tokens, seconds)
        drafts = self._drafts
        if self._context.native.level != _WHOLE or self._context.native.sparse_tokens:
            return None
        if not drafts.prepare(self._context.native.file_weights()):
            return None
        self._longer_s = _slope(seconds)
        gain = drafts.worth.gain
        return Proposal(1.01 if gain is None else gain, partial(self._make, len(tokens)))

    # -- inside ---------------------------------------------------------------------------------

    def _learn(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> None:
        """Learn from what the model said since the last call."""
        made, self._made = self._made, None
        before, self._n_tokens = self._n_tokens, len(tokens)
        drafts = self._drafts
        if made is None:
            if before is not None:
                drafts.worth.passed(max(0, len(tokens) - before), seconds)
            return
        said = tokens[made.n_before :].tolist()
        n_kept = _common(made.tokens, said)
        drafts.trust.saw(made.owns, n_kept)
        drafts.passes += 1
        drafts.proposed += len(made.tokens)
        drafts.accepted += n_kept
        verify_s = seconds.get(len(made.tokens) + 1, 0.0)
        drafts.worth.drafted(n_kept + 1, made.seconds, verify_s)

    def _make(self, n_before: int) -> list[int]:
        """Let the narrow level say tokens, until the next one would not pay for its time."""
        assert self._drafts.level is not None
        trust, worth, owns = self._drafts.trust, self._drafts.worth, []
        chance, began = 1.0, time.perf_counter()

        def pick(logits: NDArray[np.float32]) -> tuple[int, bool]:
            nonlocal chance
            token = int(logits.argmax())
            owns.append(float(1 / np.exp(logits - logits[token]).sum()))
            chance *= trust.chance(owns[-1])
            longer_s = (time.perf_counter() - began) / len(owns) + self._longer_s
            is_worth = chance * trust.mean > longer_s * worth.least_chance_a_s
            return token, is_worth or worth.is_warming_up

        tokens = self._guess(self._drafts.level, self.most, pick)
        self._made = _Made(n_before, tokens, owns, time.perf_counter() - began)
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
