"""A prompt's tokens, divided into words."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.vocabulary import Fact, Vocabulary

__all__ = ["Words", "divide"]

_MOST_TOKENS = 32
"""Tokens of a word; a longer one, such as a page without blanks, is divided."""
_MOST_INSIDE = 3
"""Tokens of one character after its first: UTF-8 has at most 4 bytes."""
_ROLES = frozenset(
    {
        "user",
        "human",
        "assistant",
        "model",
        "system",
        "developer",
        "tool",
        "function",
        "ipython",
        "observation",
    }
)
"""Names that chat templates write after a control token."""
_LONGEST_ROLE = max(map(len, _ROLES))
_AFTER_UNSPACED = Fact.LETTER | Fact.DIGIT
_MAY_BE_INNER = Fact.CAPITAL | Fact.POINT
_LINE_OR_TEXT = Fact.LINE | Fact.TEXT
_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Words of a prompt.

    Attributes:
        tokens: Token ids, shape ``(n_tokens,)``.
        starts: First token of each word, and the number of tokens, shape ``(n_words + 1,)`` int32.
        text: The whole text; marks have none.
        offsets: First character of each word, and the length of the text: ``n_words + 1`` numbers.
        texts: Text of each word, with the blanks before it; empty for a mark.
        token_facts: ``Fact`` of each token, shape ``(n_tokens,)``.
        facts: ``Fact`` of each word, those of all its tokens, shape ``(n_words,)``.
        is_markup: Whether a word is a control token, or the name or line end that belongs to one;
            shape ``(n_words,)``.
        roles: Name of who speaks, or else the mark, by the first word after a template's markup.
    """

    tokens: Tokens
    starts: NDArray[np.int32]
    text: str
    offsets: list[int]
    texts: tuple[str, ...]
    token_facts: NDArray[np.int32]
    facts: NDArray[np.int32]
    is_markup: NDArray[np.bool_]
    roles: dict[int, str]

    def any(self, facts: int) -> NDArray[np.bool_]:
        """Return which words have a token with one of these facts."""
        return np.asarray(self.facts & facts != 0)


def divide(tokens: Tokens, vocabulary: Vocabulary) -> Words:
    """Return the words of a prompt.

    A word begins at a blank, and where a script writes no blanks between words, at every token. No
    word begins in the middle of a character. A word has at most 32 tokens.

    Raises:
        ValueError: A number is no token of the model.
    """
    tokens = np.ascontiguousarray(tokens, np.int32)
    facts = vocabulary.facts(tokens)
    pieces = vocabulary.pieces(tokens)
    is_markup, roles = _markup(tokens, facts, pieces, vocabulary)
    first = _firsts(facts)
    first[1:] |= is_markup[1:] != is_markup[:-1]
    starts = _limited(np.append(np.flatnonzero(first), len(tokens)), facts)
    text, offsets = _text(pieces, vocabulary.lengths(tokens), starts)
    texts = tuple([text[at:end] for at, end in pairwise(offsets)])
    words = np.searchsorted(starts, sorted(roles))
    named = dict(zip(words.tolist(), (roles[at] for at in sorted(roles)), strict=True))
    facts, of_words = _of_words(facts, starts)
    return Words(
        tokens, starts, text, offsets, texts, facts, of_words, is_markup[starts[:-1]], named
    )


def _of_words(
    facts: NDArray[np.int32], starts: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the facts about tokens, which now tell what is inside of a word; and about words."""
    if not len(facts):
        return facts, facts
    inner = facts & _MAY_BE_INNER
    inner[starts[:-1]] &= ~Fact.CAPITAL
    inner[starts[1:] - 1] &= ~Fact.POINT
    facts = np.where(inner != 0, facts | Fact.INNER, facts)
    return facts, np.bitwise_or.reduceat(facts, starts[:-1])


def _firsts(facts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which tokens begin a word, by themselves and the token before."""
    before, here = facts[:-1], facts[1:]
    is_alone = (before | here) & Fact.ALONE != 0
    is_blank = (here & Fact.BLANK_START) | (before & Fact.BLANK_END) != 0
    is_unspaced = (here & Fact.UNSPACED_START) | (
        np.where(here & _AFTER_UNSPACED, before, 0) & Fact.UNSPACED_END
    ) != 0
    begins = (is_blank | is_unspaced) & (before & Fact.TEXT != 0)
    first = np.ones(len(facts), np.bool_)
    first[1:] = (begins & (here & Fact.INSIDE == 0)) | is_alone
    return first


def _markup(
    tokens: Tokens, facts: NDArray[np.int32], pieces: list[bytes], vocabulary: Vocabulary
) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Return which tokens belong to a template, and who speaks from which token on."""
    is_markup = facts & Fact.MARK != 0
    roles: dict[int, str] = {}
    role = ""
    for at in np.flatnonzero(is_markup).tolist():
        start = at
        while start > 0 and _is_line_end(int(facts[start - 1])):
            start -= 1
        is_markup[start:at] = True
        after, name = _name(pieces, at + 1)
        if after < len(tokens) and facts[after] & Fact.MARK:
            is_markup[at:after] = True  # a name stands between two marks, or nothing does
            role = name
            continue
        end = after
        while end < len(tokens) and _is_line_end(int(facts[end])):
            end += 1
        if end == after:
            end, name = at + 1, ""  # text that begins with such a word
        is_markup[at:end] = True
        roles[end] = name or role or vocabulary.mark(int(tokens[at]))
        role = ""
    return is_markup, roles


def _name(pieces: list[bytes], at: int) -> tuple[int, str]:
    """Return the end of the name of who speaks, and the name; ``at`` and empty without one."""
    text = ""
    for end in range(at, min(at + _LONGEST_ROLE, len(pieces))):
        if not pieces[end].strip():  # a mark, or blanks
            break
        text += pieces[end].decode(errors="replace")
        if (name := text.strip().lower()) in _ROLES:
            return end + 1, name
    return at, ""


def _is_line_end(facts: int) -> bool:
    return facts & _LINE_OR_TEXT == Fact.LINE


def _limited(starts: NDArray[np.int64], facts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the starts of words of which none is too long."""
    long = np.flatnonzero(np.diff(starts) > _MOST_TOKENS)
    if not len(long):
        return starts.astype(np.int32)
    inside = facts & Fact.INSIDE != 0
    step = _MOST_TOKENS - _MOST_INSIDE
    more = [np.arange(starts[i] + step, starts[i + 1], step) for i in long]
    added = np.concatenate(more)
    for _ in range(_MOST_INSIDE):
        added = np.where(inside[added], added - 1, added)
    return np.unique(np.concatenate([starts, added])).astype(np.int32)


def _text(
    pieces: list[bytes], lengths: NDArray[np.int32], starts: NDArray[np.int32]
) -> tuple[str, list[int]]:
    """Return the text of all words, and the first character of each, and its end.

    Bytes that are no UTF-8 become replacement characters.
    """
    ends = np.concatenate([_ZERO, lengths.cumsum()])[starts]
    whole = b"".join(pieces)
    try:
        text = whole.decode()
    except UnicodeDecodeError:
        texts = [whole[at:end].decode(errors="replace") for at, end in pairwise(ends.tolist())]
        return "".join(texts), [0, *accumulate(map(len, texts))]
    if len(text) < len(whole):
        is_first = np.frombuffer(whole, np.uint8) & 0xC0 != 0x80
        ends = np.concatenate([_ZERO, is_first.cumsum()])[ends]
    return text, ends.tolist()
