"""Words that a shortened prompt keeps, within an exact number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.scorer import Prompt

__all__ = ["Shortened", "budget", "n_read", "needs_scores", "shorten"]

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


def n_read(prompt: Prompt, n_budget: int) -> int:
    """Return about how many tokens ``shorten`` keeps, without any scores.

    Without protected words of many tokens, the true number is less by less than one word.
    """
    n_protected = _n_tokens(prompt, _protected(prompt, n_budget))
    return min(len(prompt.tokens), max(n_budget, n_protected))


def needs_scores(prompt: Prompt, n_budget: int) -> bool:
    """Return whether the protected words leave room for others."""
    return _n_tokens(prompt, _protected(prompt, n_budget)) < n_budget


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
    sizes = np.diff(prompt.starts).astype(np.int64)
    is_kept = _protected(prompt, n_budget)
    is_crowded = bool((is_kept != prompt.is_protected).any())
    room = n_budget - int(sizes[is_kept].sum())
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


# -- inside --------------------------------------------------------------------------------------


def _protected(prompt: Prompt, n_budget: int) -> NDArray[np.bool_]:
    """Return the words that must stay within a budget, shape ``(n_words,)``."""
    firm = prompt.is_protected & ~prompt.is_frequent
    room = max(0, n_budget - _n_tokens(prompt, firm))
    fits = 2 * _n_tokens(prompt, prompt.is_frequent) <= room
    return prompt.is_protected.copy() if fits else firm


def _n_tokens(prompt: Prompt, words: NDArray[np.bool_]) -> int:
    return int(np.diff(prompt.starts)[words].sum())
