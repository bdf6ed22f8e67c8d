"""Test conversations that are near-duplicates of training conversations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.users import Chat, Split

__all__ = ["Likeness", "likeness", "without_duplicates"]

_N_WORDS = 5
THRESHOLD = 0.5


class Likeness(NamedTuple):
    """Overlap of each test conversation with the training part; shape ``(n_test,)`` each.

    Attributes:
        jaccard: Largest Jaccard similarity of its shingles with any training conversation's.
        contained: Largest share of its shingles that a single training conversation contains.
        known: Share of its shingles that occur anywhere in the training part.
        asked: Whether a training conversation begins with the same user message.
    """

    jaccard: NDArray[np.float64]
    contained: NDArray[np.float64]
    known: NDArray[np.float64]
    asked: NDArray[np.bool_]


def without_duplicates(parts: Split) -> Split:
    """Return ``parts`` without test conversations that are near-duplicates of training ones."""
    found = likeness(parts)
    is_known = (found.jaccard >= THRESHOLD) | (found.contained >= THRESHOLD) | found.asked
    kept = [chat for chat, known in zip(parts.test, is_known, strict=True) if not known]
    return Split(parts.train, kept)


def likeness(parts: Split) -> Likeness:
    """Compare shingles of five words, ignoring punctuation, case and speakers."""
    index = _Index([_shingles(chat) for chat in parts.train])
    rows = [index.compare(_shingles(chat)) for chat in parts.test]
    jaccard, contained, known = np.array(rows).T
    prompts = {_prompt(chat) for chat in parts.train}
    asked = np.array([_prompt(chat) in prompts for chat in parts.test])
    return Likeness(jaccard, contained, known, asked)


class _Index:
    """Index from shingles to the training conversations that contain them."""

    def __init__(self, shingles: Sequence[set[int]]) -> None:
        self._sizes = np.array([len(some) for some in shingles])
        hashes = np.fromiter((h for some in shingles for h in some), np.int64)
        owners = np.repeat(np.arange(len(shingles)), self._sizes)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._owners = hashes[order], owners[order]

    def compare(self, shingles: set[int]) -> tuple[float, float, float]:
        own = np.fromiter(shingles, np.int64)
        starts, ends = (np.searchsorted(self._hashes, own, side) for side in ("left", "right"))
        spans = [self._owners[a:b] for a, b in zip(starts, ends, strict=True)]
        common = np.bincount(np.concatenate(spans), minlength=len(self._sizes))
        jaccard = common / (self._sizes + len(own) - common)
        known = (ends > starts).mean()
        return float(jaccard.max()), float(common.max() / len(own)), float(known)


def _shingles(chat: Chat) -> set[int]:
    words = [word for _, content in chat.turns for word in _words(content)]
    n = max(1, len(words) - _N_WORDS + 1)
    return {hash(tuple(words[start : start + _N_WORDS])) for start in range(n)}


def _prompt(chat: Chat) -> tuple[str, ...]:
    return tuple(_words(chat.turns[0][1]))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
