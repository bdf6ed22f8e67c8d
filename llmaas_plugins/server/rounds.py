"""Rounds of calls that are decoded together: their order, their time, and who takes part.

In a round, a token of each call is evaluated, in one batch for each level, and sampled. A piece of
a prompt may be evaluated between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from llmaas_plugins.server.calls import Stage
from llmaas_plugins.server.estimates import mean
from llmaas_plugins.server.prompt_pieces import LEAST_PIECE, MOST_PIECE, PIECE_S

__all__ = ["Member", "Pieces", "Rounds", "may_share", "next_member"]


class Member(NamedTuple):
    """A call aside.

    Attributes:
        stage: Why it is aside.
        is_over: Whether it only has to end.
        is_expected: Whether it will soon want the engine, if its text is on its way.
        level: Index of the level of its next token.
    """

    stage: Stage
    is_over: bool = False
    is_expected: bool = False
    level: int = 0


def next_member(members: Sequence[Member], stepped: AbstractSet[int]) -> int | None:
    """Return the index of the call aside that uses the engine next; None if none can.

    Calls that end come first. The results of a batch are lost with the next one, so calls whose
    token is evaluated are next, and then those that come back from their clients, so that the next
    batch has their tokens. Calls that go alone follow. A call whose token is to be evaluated
    evaluates those of all that have its level. The call that waits longest is first, so no level
    waits for more than one batch of each other one.

    Args:
        members: Calls aside, in the order in which they left the engine.
        stepped: Levels of which no batch may be evaluated now.
    """
    over = [m.is_over and m.stage is not Stage.AWAY for m in members]
    if True in over:
        return over.index(True)
    stages = [member.stage for member in members]
    for stage in (Stage.READY, Stage.BACK, Stage.ALONE):
        if stage in stages:
            return stages.index(stage)
    late = {m.level for m in members if m.stage is Stage.AWAY and m.is_expected}
    due = [m.stage is Stage.TOKEN and m.level not in late | stepped for m in members]
    return due.index(True) if True in due else None


class Pieces:
    """Size of the pieces in which prompts are evaluated between batches of the group.

    A piece takes about as long as a batch of the group, or 100 ms if that is longer. The time of a
    piece may hardly depend on its size, as where weights are read from disk; so the size is doubled
    and halved by the times of whole pieces.

    Attributes:
        n_tokens: Most tokens of the next piece.
        most_s: Seconds that it should take at most.
    """

    def __init__(self) -> None:
        """Start with a small piece."""
        self.n_tokens = 64
        self.most_s = PIECE_S
        self._most = MOST_PIECE

    def fit(self, n_batch: int) -> None:
        """Make pieces of one batch of the engine at most: a larger one would not be timed."""
        self._most = min(max(n_batch, LEAST_PIECE), MOST_PIECE)
        self.n_tokens = min(self.n_tokens, self._most)

    def stepped(self, seconds: float) -> None:
        """Learn how long a batch of the group took."""
        self.most_s = max(PIECE_S, seconds)

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Learn how long a piece took; other batches tell nothing."""
        if n_tokens == self.n_tokens:
            is_long = seconds > 1.5 * self.most_s
            size = n_tokens // 2 if is_long else 2 * n_tokens
            if is_long or seconds < 0.6 * self.most_s:
                self.n_tokens = min(max(size, LEAST_PIECE), self._most)


class Rounds:
    """Times of rounds, from those of batches."""

    def __init__(self) -> None:
        """Start without times."""
        self._batch_s: dict[tuple[int, int], float] = {}
        self._sample_s = 0.0

    def stepped(self, level: int, n_tokens: int, seconds: float) -> None:
        """Learn how long a batch of this many calls took."""
        self._batch_s[level, n_tokens] = mean(self._batch_s.get((level, n_tokens)), seconds)

    def sampled(self, seconds: float) -> None:
        """Learn how long a call used the engine after a batch."""
        self._sample_s = mean(self._sample_s or None, seconds)

    def seconds(self, sizes: Mapping[int, int]) -> float:
        """Return the longest time that a round is expected to take; infinite if none is known.

        A batch takes in proportion no longer than a smaller one.

        Args:
            sizes: Number of calls by level.
        """
        batches_s = sum(self._batch(level, n) for level, n in sizes.items())
        return batches_s + sum(sizes.values()) * self._sample_s

    def _batch(self, level: int, n_tokens: int) -> float:
        known = (
            seconds * n_tokens / n
            for (of_level, n), seconds in self._batch_s.items()
            if of_level == level and n <= n_tokens
        )
        return min(known, default=math.inf)


def may_share(limit_s: float | None, round_s: float, spent_s: float, n_tokens: int) -> bool:
    """Return whether a call that was promised a time of each token is decoded with others.

    It is if a round takes no longer than its limit, and its next token then comes in time.

    Args:
        limit_s: Longest mean time of a token after the first; None if nothing was promised.
        round_s: Expected time of a round.
        spent_s: Seconds since the first token.
        n_tokens: Tokens since then.
    """
    if limit_s is None:
        return True
    return round_s <= limit_s and spent_s + round_s <= (n_tokens + 1) * limit_s
