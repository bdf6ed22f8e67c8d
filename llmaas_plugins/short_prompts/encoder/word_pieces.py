"""Word pieces of an uncased BERT, word by word, so that each piece is known to belong to a word."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError

__all__ = ["Pieces", "WordPieces"]

_MOST_KNOWN, _MOST_KEPT = 1 << 14, 64
"""Most words whose pieces are kept, and most characters of such a word."""
_MOST_LETTERS = 100
"""Longest run of letters that is divided; a longer one is unknown, as in BERT."""
_ASCII_RUN = re.compile(r"[a-z0-9]+|[^a-z0-9 ]")
_CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class Pieces(NamedTuple):
    """Pieces of some words.

    Attributes:
        ids: Ids of all pieces, shape ``(n,)`` int32.
        starts: First piece of each word, and the number of pieces, shape ``(n_words + 1,)`` int64.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]


class WordPieces:
    """Division of words into pieces.

    Attributes:
        begin: Id of the piece that begins a window.
        end: Id of the piece that ends a window.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        """Index a vocabulary.

        Raises:
            ConfigError: The vocabulary lacks BERT's special pieces.
        """
        self._ids = {piece: i for i, piece in enumerate(vocabulary)}
        try:
            self.begin, self.end = self._ids["[CLS]"], self._ids["[SEP]"]
            self._unknown = self._ids["[UNK]"]
        except KeyError as error:
            raise ConfigError(
                f"the encoder's vocabulary has no piece {error}, expected that of a BERT."
            ) from error
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, words: Sequence[str]) -> Pieces:
        """Return the pieces of words; a word of blanks has none."""
        known, find = self._known, self._find
        found = [known.get(word) or find(word) for word in words]
        starts = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, found), np.int64, len(found)), out=starts[1:])
        ids = np.fromiter(itertools.chain.from_iterable(found), np.int32, int(starts[-1]))
        return Pieces(ids, starts)

    def _find(self, word: str) -> tuple[int, ...]:
        found = tuple(piece for run in _runs(word) for piece in self._divided(run))
        if len(word) <= _MOST_KEPT:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[word] = found
        return found

    def _divided(self, run: str) -> Sequence[int]:
        """Return the longest pieces of the vocabulary that make up a run, from its start on."""
        if len(run) > _MOST_LETTERS:
            return (self._unknown,)
        found, at, ids = [], 0, self._ids
        while at < len(run):
            mark = "##" if at else ""
            ends = range(len(run), at, -1)
            end = next((end for end in ends if mark + run[at:end] in ids), None)
            if end is None:
                return (self._unknown,)
            found.append(ids[mark + run[at:end]])
            at = end
        return found


# -- inside --------------------------------------------------------------------------------------


def _runs(text: str) -> Iterable[str]:
    """Return runs of letters without accents, and single characters of other kinds."""
    plain = text.strip().lower()
    if plain.isascii() and plain.isprintable():  # as most words are
        return _ASCII_RUN.findall(plain)
    return _unicode_runs(plain)


def _unicode_runs(text: str) -> Iterator[str]:
    run = list[str]()
    for character in unicodedata.normalize("NFD", text):
        kind = _kind(character)
        if kind == _LETTER:
            run.append(character)
        elif kind != _NOTHING:
            if run:
                yield "".join(run)
                run = []
            if kind == _ALONE:
                yield character
    if run:
        yield "".join(run)


_LETTER, _ALONE, _BLANK, _NOTHING = range(4)


@functools.lru_cache(4096)
def _kind(character: str) -> int:
    """Return how a character divides a word, as BERT's basic tokenizer has it."""
    category, code = unicodedata.category(character), ord(character)
    if character in " \t\n\r" or category == "Zs":
        return _BLANK
    if category == "Mn" or category.startswith("C") or code == 0xFFFD:
        return _NOTHING
    is_ascii_sign = code < 128 and not character.isalnum()
    if is_ascii_sign or category.startswith("P") or any(a <= code <= b for a, b in _CJK):
        return _ALONE
    return _LETTER
