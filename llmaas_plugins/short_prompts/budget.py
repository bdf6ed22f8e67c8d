"""Words that a shortened prompt keeps, within an exact number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.scorer import Prompt

__all__ = ["Room", "Shortened", "budget", "shorten"]

_ROUNDING = 1e-6
"""Shares such as 0.29 are not exact in binary; the product with 100 is 29."""


@dataclass(frozen=True, slots=True, eq=False)
class Shortened:
    """A prompt without the words that matter least.

    Attributes:
        prompt: The whole prompt.
        is_kept: Whether a word is kept, shape ``(n_words,)``.
        tokens: Tokens of the kept words, in their order, shape ``(n_read,)``.
        exceeds: Whether the protected words alone are more than the budget; only they are kept.
        is_crowded: Whether numbers, names and quoted words are judged as all others, because they
            would take more than half of what other protected words leave of the budget.
    """

    prompt: Prompt
    is_kept: NDArray[np.bool_]
    tokens: Tokens
    exceeds: bool
    is_crowded: bool

    @property
    def n_left_out(self) -> int:
        """Number of tokens that are left out."""
        return len(self.prompt.tokens) - len(self.tokens)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Texts that are left out, in their order; consecutive words are one text."""
        ends = np.flatnonzero(np.diff(~self.is_kept, prepend=False, append=False)).tolist()
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return tuple("".join(self.prompt.words[start:end]) for start, end in pairs)


def budget(prompt: Prompt, share: float) -> int:
    """Return the most tokens of a prompt that a share allows, at least 1."""
    return max(1, math.floor(share * len(prompt.tokens) + _ROUNDING))


class Room(NamedTuple):
    """Tokens of a prompt that must stay, which tell what a budget leaves for others.

    Attributes:
        n_tokens: Tokens of the prompt.
        n_protected: Tokens of protected words.
        n_frequent: Tokens of protected words that are frequent (``Prompt.is_frequent``).
    """

    n_tokens: int
    n_protected: int
    n_frequent: int

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """Count the tokens of a prompt."""
        sizes = np.diff(prompt.starts)
        counts = (int(sizes[words].sum()) for words in (prompt.is_protected, prompt.is_frequent))
        return cls(len(prompt.tokens), *counts)

    def is_crowded(self, n_budget: int) -> bool:
        """Return whether frequent words would take more than half of what the others leave."""
        n_left = n_budget - (self.n_protected - self.n_frequent)
        return 2 * self.n_frequent > max(0, n_left)

    def n_kept(self, n_budget: int) -> int:
        """Return the tokens of the words that must stay within a budget."""
        return self.n_protected - (self.n_frequent if self.is_crowded(n_budget) else 0)

    def n_read(self, n_budget: int) -> int:
        """Return about how many tokens ``shorten`` keeps, without any scores.

        Without protected words of many tokens, the true number is less by less than one word.
        """
        return min(self.n_tokens, max(n_budget, self.n_kept(n_budget)))

    def needs_scores(self, n_budget: int) -> bool:
        """Return whether the words that must stay leave room for others."""
        return self.n_kept(n_budget) < n_budget


def shorten(prompt: Prompt, scores: NDArray[np.float32], n_budget: int) -> Shortened:
    """Return a prompt with its protected words and those with the largest scores.

    Words are taken in the order of their scores, and among equal ones in that of the prompt, as
    long as they fit. A word that does not fit is left out, and smaller ones after it may still be
    taken. So no more than ``n_budget`` tokens are kept, and no word that was left out would fit.

    Args:
        prompt: The prompt.
        scores: Number for each word, shape ``(n_words,)``. NaN counts as the smallest.
        n_budget: Most tokens to keep. If the protected words are more, exactly they are kept.
            Numbers, names and quoted words are protected if they take at most half of what the
            others leave: a text full of them would else be a list of them, without what they are
            about.
    """
    sizes, must_stay = np.diff(prompt.starts), Room.of(prompt)
    is_crowded = must_stay.is_crowded(n_budget)
    is_kept = prompt.is_protected & ~(prompt.is_frequent & is_crowded)
    room = n_budget - must_stay.n_kept(n_budget)
    free = np.flatnonzero(~is_kept)
    order = free[np.argsort(-scores[free], kind="stable")]  # NaN comes last
    while room > 0 and len(order):
        order = order[sizes[order] <= room]
        n = int(np.searchsorted(sizes[order].cumsum(), room, side="right"))
        is_kept[order[:n]] = True
        room -= int(sizes[order[:n]].sum())
        order = order[n:]
    tokens = prompt.tokens[np.repeat(is_kept, sizes)]
    return Shortened(prompt, is_kept, tokens, exceeds=room < 0, is_crowded=is_crowded)
