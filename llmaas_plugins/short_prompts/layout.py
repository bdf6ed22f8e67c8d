"""Lines and sentences of a prompt."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.short_prompts.vocabulary import Fact
from llmaas_plugins.short_prompts.words import Words

__all__ = ["Layout", "layout_of"]

_ABBREVIATION, _LONGEST = re.compile(r"\s?[A-Z]\w?\."), 4
"""Words such as ``Mr.`` or an initial, after which a sentence goes on; their most characters."""
_TEXT_OR_CLOSING = Fact.TEXT | Fact.CLOSING


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Places in the text of a prompt.

    Attributes:
        words: The prompt's words.
        breaks: Line ends between a word and the one before, shape ``(n_words,)``.
        is_line: Whether a word begins a line, shape ``(n_words,)``.
        begins: Whether a word begins a sentence, shape ``(n_words,)``.
    """

    words: Words
    breaks: NDArray[np.int32]
    is_line: NDArray[np.bool_]
    begins: NDArray[np.bool_]

    def spans(self, found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the words in which these spans of characters lie: first words, and ends."""
        offsets = self.words.offsets
        return [
            (bisect_right(offsets, start) - 1, bisect_left(offsets, end)) for start, end in found
        ]


def layout_of(words: Words) -> Layout:
    """Return the lines and sentences of a prompt."""
    breaks = _breaks(words)
    is_line = breaks > 0
    is_line[:1] = True
    is_line[1:] |= words.is_markup[:-1]
    begins = is_line.copy()
    begins[1:] |= _stops(words)[:-1]
    return Layout(words, breaks, is_line, begins)


def _breaks(words: Words) -> NDArray[np.int32]:
    found = np.zeros(len(words.texts) + 1, np.int32)
    for at in np.flatnonzero(words.any(Fact.LINE)).tolist():
        text = words.texts[at]
        start = len(text) - len(text.lstrip())
        found[at] += text.count("\n", 0, start)
        if start < len(text):
            found[at + 1] += text.count("\n", len(text.rstrip()))
    return found[:-1]


def _stops(words: Words) -> NDArray[np.bool_]:
    """Return which words end a sentence, also if quotation marks or brackets close after that."""
    facts, starts = words.token_facts, words.starts
    has_text = facts & _TEXT_OR_CLOSING == Fact.TEXT
    last = np.maximum.accumulate(np.where(has_text, np.arange(len(facts)), -1))
    last = last[starts[1:] - 1]
    is_own = last >= starts[:-1]
    stops = is_own & (facts[last] & Fact.STOP != 0)
    for at in np.flatnonzero(stops).tolist():
        if len(words.texts[at]) <= _LONGEST and _ABBREVIATION.fullmatch(words.texts[at]):
            stops[at] = False
    return np.asarray(stops, np.bool_)
