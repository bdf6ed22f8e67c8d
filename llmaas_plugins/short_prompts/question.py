"""The question of a prompt: the part at the end that its answer is about."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.short_prompts.layout import Layout
from llmaas_plugins.short_prompts.vocabulary import Fact
from llmaas_plugins.short_prompts.words import Words

__all__ = ["Question", "find_question"]

_MOST_TOKENS = 128
"""Tokens of a question. A longer turn is taken for a text with a question at its end."""
_LEAST_TOKENS = 8
"""Tokens that a question has at least; so ``Answer:`` alone is none."""
_ASKED = "user|human|prompter|instruction|question|query|input|inst|q"
_SAID = "assistant|ai|bot|gpt|model|response|answer|output|system|(?P<a>a)"
_LINE = re.compile(
    rf"(?:\#{{1,4}}[ \t]*|<\|)?(?:(?P<asked>{_ASKED})|{_SAID})(?:\|>|[ \t]?:)"
    rf"|<(?:\|im_start\||start_of_turn)>(?:(?P<started>{_ASKED})|\w)",
    re.IGNORECASE,
)
"""Text that begins a turn at the start of a line, in templates without control tokens."""
_INSIDE = re.compile(r"\b(?:(?P<asked>USER|HUMAN)|ASSISTANT):|(?P<inst>\[INST\])|\[/INST\]")
"""Text that begins a turn anywhere."""
_INSIDE_LINES = ("USER:", "HUMAN:", "[INST]")
_ASKED_MARK = re.compile(rf"[^\w/]*(?:{_ASKED})(?:_token)?[^\w/]*", re.IGNORECASE)
"""Names and control tokens with which the user's turns begin."""


class Question(NamedTuple):
    """Words of a question.

    Attributes:
        start: First word of the question itself.
        spans: Words to keep for it, and those that open the last turns: first words, and ends.
        openings: Words that open the turns before, in the same form.
    """

    start: int
    spans: tuple[tuple[int, int], ...]
    openings: tuple[tuple[int, int], ...] = ()


class _Opening(NamedTuple):
    """Start of a turn.

    Attributes:
        start, end: First word that opens the turn, and first one of the turn.
        is_asked: Whether the user speaks.
    """

    start: int
    end: int
    is_asked: bool


def find_question(words: Words, layout: Layout) -> Question:
    """Return the question of a prompt, and the words that open turns.

    In a chat the question is the user's last turn. If that has more than 128 tokens, the question
    is its last paragraph, and its first line is kept as well. In a prompt without turns, it is the
    last paragraph, too; or the last line, sentence or words, if that is too long or is the whole
    prompt. If text follows the user's last turn, its end is kept, because the model goes on there.
    """
    finder = _Finder(words, layout)
    openings = _openings(words, layout)
    n = finder.end_of_text(openings)
    turn = finder.last_asked(openings)
    begin = finder.last_part(finder.start_of_text(n), n) if turn is None else turn[0]
    marks = [(one.start, one.end) for one in openings]
    before = tuple(mark for mark in marks if mark[1] < begin)
    last = [mark for mark in marks if mark[1] >= begin]
    if turn is None:
        return Question(begin, (*last, (begin, n)), before)
    start, end = turn
    spans = [*last, (finder.last_part(end, n), n)] if end < n else last
    if finder.n_tokens(start, end) <= _MOST_TOKENS:
        return Question(start, (*spans, (start, end)), before)
    part = finder.last_part(start, end)
    first = start, finder.first_part(start, end)
    return Question(part, (*spans, first, (part, end)), before)


class _Finder:
    """Search in the words of a prompt."""

    def __init__(self, words: Words, layout: Layout) -> None:
        self._words, self._layout = words, layout
        self._starts = words.starts

    def n_tokens(self, start: int, end: int) -> int:
        return int(self._starts[end] - self._starts[start])

    def start_of_text(self, end: int) -> int:
        """Return the first word that is no markup, at most ``end``."""
        found = np.flatnonzero(~self._words.is_markup[:end])
        return int(found[0]) if len(found) else end

    def end_of_text(self, openings: list[_Opening]) -> int:
        """Return the end of the last word that is no markup."""
        end = len(self._words.texts)
        heads = {one.end: one.start for one in openings}
        while end > 0:
            if (start := heads.get(end, end)) < end:
                end = start
            elif self._words.is_markup[end - 1]:
                end -= 1
            else:
                break
        return end

    def last_asked(self, openings: list[_Opening]) -> tuple[int, int] | None:
        """Return the words of the user's last turn; None if there is none."""
        end = len(self._words.texts)
        for one in reversed(openings):
            while end > one.end and self._words.is_markup[end - 1]:
                end -= 1
            if one.is_asked and one.end < end:
                return one.end, end
            end = one.start
        return None

    def first_part(self, start: int, end: int) -> int:
        """Return the end of the first line, or of the first sentence if the line is too long."""
        for begins in (self._layout.is_line, self._layout.begins):
            found = np.flatnonzero(begins[start + 1 : end])
            stop = start + 1 + int(found[0]) if len(found) else end
            if self.n_tokens(start, stop) <= _MOST_TOKENS:
                return stop
        return start

    def last_part(self, start: int, end: int) -> int:
        """Return the start of the last paragraph, or of less if it is too long or is everything."""
        starts, breaks = self._starts, self._layout.breaks
        first = int(starts.searchsorted(starts[end] - _MOST_TOKENS))  # else it would be too long
        last = int(starts.searchsorted(starts[end] - _LEAST_TOKENS, side="right"))
        for begins in (breaks > 1, self._layout.is_line, self._layout.begins):
            found = np.flatnonzero(begins[max(start + 1, first) : last])
            if len(found):
                return max(start + 1, first) + int(found[-1])
        return max(start, min(last, end) - 1)


def _openings(words: Words, layout: Layout) -> list[_Opening]:
    found = [
        _Opening(at, at, _ASKED_MARK.fullmatch(role) is not None)
        for at, role in words.roles.items()
    ]
    lines = _lines(words, layout)
    has_q = any(match["asked"] in ("Q", "q") for match in lines)
    matches = [match for match in lines if has_q or match["a"] is None]  # else it is choice A
    if any(one in words.text for one in _INSIDE_LINES):
        matches += _INSIDE.finditer(words.text)
    spans = layout.spans(match.span() for match in matches)
    for match, (start, end) in zip(matches, spans, strict=True):
        groups = match.groupdict()
        groups.pop("a", None)
        found.append(_Opening(start, end, any(groups.values())))
    return sorted(found)


def _lines(words: Words, layout: Layout) -> list[re.Match[str]]:
    """Return what begins turns at the starts of lines."""
    text, offsets, texts = words.text, words.offsets, words.texts
    found = []
    for at in np.flatnonzero(layout.is_line & _may_open(words)).tolist():
        match = _LINE.match(text, offsets[at + 1] - len(texts[at].lstrip()))
        if match is not None:
            found.append(match)
    return found


def _may_open(words: Words) -> NDArray[np.bool_]:
    """Return which words have a sign that opens a turn, or have it in the next word."""
    has = words.any(Fact.SYMBOL | Fact.POINT)
    has[:-1] |= has[1:]
    return has
