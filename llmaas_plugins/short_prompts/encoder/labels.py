"""Labels to learn from: words of a text that its summary keeps, or those with large weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["kept_words", "largest", "words_of"]

_WORD = re.compile(r"\s*\S+")
_WINDOW = 200
"""Words on each side of the last match in which the next one is looked for."""
_ENDINGS = ("ing", "edly", "ies", "ed", "es", "er", "ly", "s", "e", "y")
_LEAST_STEM = 3


def words_of(text: str) -> list[str]:
    """Return the words of a text, each with the blanks before it; blanks at the end are left out.

    Args:
        text: The text.
    """
    return _WORD.findall(text)


def kept_words(words: Sequence[str], summary: Sequence[str], window: int = _WINDOW) -> list[bool]:
    """Return which words of a text its summary keeps.

    A summary's word is looked for around the place of the last one that was found: first nearby,
    then farther away. A word that is not found moves nothing, so those after it are still found.
    Words match if their stems are equal.

    Args:
        words: Words of the text.
        summary: Words of the summary.
        window: Most words between a match and the one before it.
    """
    places = defaultdict[str, list[int]](list)
    for place, word in enumerate(words):
        if stem := _stem(word):
            places[stem].append(place)
    kept, last = [False] * len(words), 0
    for word in summary:
        near = [i for i in places.get(_stem(word), ()) if abs(i - last) <= window]
        if near:
            last = min(near, key=lambda i: (kept[i], abs(i - last), i < last))
            kept[last] = True
    return kept


def largest(values: NDArray[np.float32], share: float) -> list[bool]:
    """Return which values are the largest ones; at least one is.

    Args:
        values: The values.
        share: Share of them that are returned as large.
    """
    n = max(1, round(share * len(values)))
    found = np.zeros(len(values), bool)
    found[np.argsort(-values, kind="stable")[:n]] = True
    return found.tolist()


# -- inside --------------------------------------------------------------------------------------


def _stem(word: str) -> str:
    """Return a word without signs around it, upper case and an ending."""
    plain = re.sub(r"^\W+|\W+$", "", word.casefold())
    plain = re.sub(r"['\u2019]\w{1,2}$", "", plain)
    for ending in _ENDINGS:
        if plain.endswith(ending) and len(plain) - len(ending) >= _LEAST_STEM:
            return plain.removesuffix(ending)
    return plain
