"""Pieces in which prompts are evaluated, so that other calls may go between them.

A piece takes about 100 ms at the level that evaluates it. The size of a call's pieces is decided
once, from the times that ``llmaas elastic profile`` measured. So a prompt is cut alike, whatever
else runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

from llmaas_hooks import Levels, LevelTimes, Request

__all__ = ["LEAST_PIECE", "MOST_PIECE", "PIECE_S", "PromptTimes", "piece_of"]

PIECE_S = 0.1
"""Seconds that a piece of a prompt is to take."""
LEAST_PIECE, MOST_PIECE = 8, 512
"""Tokens of the smallest and of the largest piece."""
_MOST_OF_LEAST = 1.5
"""Time of a piece over that of the smallest one, up to which its tokens hardly cost anything."""
_MOST_OVER = 0.25
"""Share by which pieces may be larger, so that none is much smaller than the others."""


class PromptTimes(NamedTuple):
    """Times of a call's prompt.

    Attributes:
        levels: Times of each level, widest first; empty if none were measured.
        level: Level of the prompt; None is that of the whole model.
        n_batch: Most tokens that the engine evaluates at once.
    """

    levels: Sequence[LevelTimes] = ()
    level: float | None = None
    n_batch: int = MOST_PIECE

    def of(self, request: Request, chosen: Levels | None) -> Self:
        """Return these times with the level and the batches of a request; the app's levels win."""
        params = request.engine.llama.context_params
        level = request.levels.over(chosen).prefill
        return self._replace(level=level, n_batch=int(min(params.n_batch, params.n_ubatch)))

    def most_tokens(self) -> int | None:
        """Return the most tokens that take 100 ms, a multiple of 8; None if no time is known.

        Where even 8 tokens take longer, as where weights are read from disk, a piece has as many as
        take little more time than these.
        """
        if not self.levels:
            return None
        level = self.levels[0].level if self.level is None else self.level
        fitting = (one for one in self.levels if one.level <= level)
        times = next(fitting, self.levels[-1])
        most_s = max(PIECE_S, _MOST_OF_LEAST * times.ttft_s(LEAST_PIECE))
        low, high = 1, MOST_PIECE // LEAST_PIECE
        while low < high:
            middle = (low + high + 1) // 2
            fits = times.ttft_s(middle * LEAST_PIECE) <= most_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * LEAST_PIECE


def piece_of(n_tokens: int, n_most: int, n_batch: int = MOST_PIECE) -> int:
    """Return the size of the pieces of a prompt, which are about equal.

    The engine evaluates a piece in batches, so a larger one is a multiple of a batch.

    Args:
        n_tokens: Tokens of the prompt that remain to be evaluated.
        n_most: Most tokens of a piece, about.
        n_batch: Most tokens that the engine evaluates at once.
    """
    n_pieces = max(math.ceil(n_tokens / n_most - _MOST_OVER), 1)
    found = min(max(math.ceil(n_tokens / n_pieces), LEAST_PIECE), MOST_PIECE)
    return found // n_batch * n_batch if found > n_batch else found
