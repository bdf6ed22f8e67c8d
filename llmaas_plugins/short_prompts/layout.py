"""Lines and sentences of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.short_prompts.vocabulary import Fact
from llmaas_plugins.short_prompts.words import Words

__all__ = ["Layout", "layout_of"]

_ABBREVIATION = re.compile(r"\s*[A-Z]\w?\.")
"""Words such as ``Mr.`` or an initial, after which a sentence goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Places in the text of a prompt.

    Attributes:
        words: The prompt's words.
        text: The whole text; marks have none.
        offsets: First character of each word, and the length of the text, shape ``(n_words + 1,)``.
        breaks: Line ends between a word and the one before, shape ``(n_words,)``.
        is_line: Whether a word begins a line, shape ``(n_words,)``.
        begins: Whether a word begins a sentence, shape ``(n_words,)``.
    """

    words: Words
    text: str
    offsets: NDArray[np.int64]
    breaks: NDArray[np.int32]
    is_line: NDArray[np.bool_]
    begins: NDArray[np.bool_]

    def core(self, word: int) -> int:
        """Return the first character of a word that is no blank, or the end of the word."""
        text = self.words.texts[word]
        return int(self.offsets[word]) + len(text) - len(text.lstrip())

    def spans(self, found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the words in which these spans of characters lie: first words, and ends."""
        places = np.array(list(found), np.int64).reshape(-1, 2)
        starts = self.offsets.searchsorted(places[:, 0], side="right") - 1
        ends = self.offsets.searchsorted(places[:, 1], side="left")
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def layout_of(words: Words) -> Layout:
    """Return the lines and sentences of a prompt."""
    texts = words.texts
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    breaks = _breaks(words)
    is_line = breaks > 0
    is_line[:1] = True
    is_line[1:] |= words.is_markup[:-1]
    begins = is_line.copy()
    begins[1:] |= _stops(words)[:-1]
    return Layout(words, "".join(texts), offsets, breaks, is_line, begins)


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
    has_text = facts & int(Fact.TEXT | Fact.CLOSING) == int(Fact.TEXT)
    last = np.maximum.accumulate(np.where(has_text, np.arange(len(facts)), -1))
    last = last[starts[1:] - 1]
    is_own = last >= starts[:-1]
    stops = is_own & (facts[last] & int(Fact.STOP) != 0)
    for at in np.flatnonzero(stops).tolist():
        if _ABBREVIATION.fullmatch(words.texts[at]):
            stops[at] = False
    return np.asarray(stops, np.bool_)
