"""Words of a prompt that are never left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.layout import Layout, layout_of
from llmaas_plugins.short_prompts.patterns import Pattern
from llmaas_plugins.short_prompts.question import find_question
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.vocabulary import Fact, Vocabulary
from llmaas_plugins.short_prompts.words import Words, divide

__all__ = ["KINDS", "PROTECTION", "Protection", "prompt_of"]

KINDS = frozenset({"code", "numbers", "names", "quotes"})
"""Kinds of words that may be protected, beside the question and a template's marks."""
_FENCED = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]{1,300}`", re.DOTALL)
_QUOTED = re.compile(r'["“”«„][^"“”«»„\n]{1,300}["“”»]')
_CODE = re.compile(
    r"_|\w[.:]\w|::|[=-]>|[<>=!]=|\w\(|\(\)|[a-zß-ÿ][A-Z]|[\\/]\w|\w@\w|[#$@]\w|--\w|[{}\[\]]"
)
"""Identifiers, addresses and paths."""
_NO_NAME = re.compile("I(?:['\u2019].*)?")
"""The word for oneself, which is always written with a capital letter."""
_AROUND = " \t\r\n\"'“”\u2018\u2019«»„()[]{}*.,;:!?…"
_MOST_NAMES = 0.4
"""If a larger share of words begins with a capital letter, that does not show names."""


@dataclass(frozen=True, slots=True)
class Protection:
    """Words that are never left out.

    Attributes:
        kinds: Kinds of words, of ``KINDS``.
        patterns: Expressions of the user; words that they match, or match in part.
    """

    kinds: frozenset[str] = KINDS
    patterns: tuple[Pattern, ...] = ()


PROTECTION = Protection()


def prompt_of(tokens: Tokens, vocabulary: Vocabulary, protect: Protection = PROTECTION) -> Prompt:
    """Divide a prompt into words, and find those that must be kept.

    The first token, the marks of a chat's template and the question are always kept.

    Raises:
        ValueError: A number is no token of the model.
    """
    words = divide(tokens, vocabulary)
    layout = layout_of(words)
    question = find_question(words, layout)
    kept = words.is_markup.copy()
    kept[:1] = True
    for start, end in question.spans:
        kept[start:end] = True
    if "code" in protect.kinds:
        _keep_code(words, layout, kept)
    for pattern in protect.patterns:
        _keep(kept, layout.spans(pattern.spans(words.text)))
    frequent = _frequent(words, layout, protect.kinds)
    _keep(frequent, question.openings)
    frequent &= ~kept
    return Prompt(
        words.tokens, words.starts, words.texts, kept | frequent, frequent, question.start
    )


def _frequent(words: Words, layout: Layout, kinds: frozenset[str]) -> NDArray[np.bool_]:
    """Return the numbers, the names and the quoted words, of which texts may be full."""
    found = np.zeros(len(words.texts), np.bool_)
    if "numbers" in kinds:
        found |= words.any(Fact.DIGIT)
    if "names" in kinds:
        found |= _names(words, layout)
    if "quotes" in kinds and words.any(Fact.QUOTE).any():
        _keep(found, layout.spans(match.span() for match in _QUOTED.finditer(words.text)))
    return found


def _keep(kept: NDArray[np.bool_], spans: Iterable[tuple[int, int]]) -> None:
    for start, end in spans:
        kept[start:end] = True


def _keep_code(words: Words, layout: Layout, kept: NDArray[np.bool_]) -> None:
    """Keep code between marks, identifiers, addresses and paths."""
    may_be = words.any(Fact.SYMBOL | Fact.INNER) & words.any(Fact.LETTER)  # 13.11 is a number
    for at in np.flatnonzero(may_be & ~kept).tolist():
        if _CODE.search(words.texts[at]):
            kept[at] = True
    if words.any(Fact.TICK).any():
        _keep(kept, layout.spans(match.span() for match in _FENCED.finditer(words.text)))


def _names(words: Words, layout: Layout) -> NDArray[np.bool_]:
    """Return which words begin with a capital letter, though no sentence begins there.

    A word that begins a sentence counts if it also stands elsewhere. Texts in which most words have
    capital letters, such as headlines, show no names.
    """
    is_capital, has_letter = _capitals(words)
    inner = is_capital & ~layout.begins
    if inner.sum() > _MOST_NAMES * has_letter.sum():
        return np.zeros_like(inner)
    cores = {at: words.texts[at].strip(_AROUND) for at in np.flatnonzero(is_capital).tolist()}
    inside = [at for at in np.flatnonzero(inner).tolist() if not _NO_NAME.fullmatch(cores[at])]
    names = {cores[at] for at in inside}
    found = np.zeros_like(inner)
    found[[at for at, core in cores.items() if core in names]] = True
    return found


def _capitals(words: Words) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which words' first letter is a capital one, and which words have letters."""
    facts, starts = words.token_facts, words.starts
    if not len(facts):
        return np.zeros(0, np.bool_), np.zeros(0, np.bool_)
    at = np.where(facts & Fact.LETTER, np.arange(len(facts)), len(facts))
    first = np.minimum.reduceat(at, starts[:-1])
    has_letter = first < len(facts)
    is_capital = has_letter & (facts[np.minimum(first, len(facts) - 1)] & Fact.CAPITAL != 0)
    return is_capital, has_letter
