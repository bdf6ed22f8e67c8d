"""Scores with which whole sentences or clauses are kept, and not single words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.short_prompts.layout import layout_of
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of
from llmaas_plugins.short_prompts.words import divide

__all__ = ["CLAUSE", "SENTENCE", "UNITS", "begins_of", "by_stretch"]

SENTENCE, CLAUSE = "sentences", "clauses"
UNITS: Mapping[str, str] = MappingProxyType({SENTENCE: "", CLAUSE: ",;"})
"""Units, by the signs after which one ends beside the ends of sentences and lines."""


def begins_of(prompt: Prompt, unit: str, llama: Any) -> NDArray[np.bool_]:
    """Return which words begin a sentence or a clause, shape ``(n_words,)``."""
    begins = layout_of(divide(prompt.tokens, vocabulary_of(llama))).begins.copy()
    ends = [bool(word.rstrip()) and word.rstrip()[-1] in UNITS[unit] for word in prompt.words]
    begins[1:] |= np.array(ends[:-1], bool)
    return begins


def by_stretch(
    prompt: Prompt, scores: NDArray[np.float32], begins: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the mean score of its stretch for each word; a word counts by its tokens.

    So stretches are kept as wholes, the best first. The first words of the last one fill the room
    that is left, so that all units keep equally many tokens.

    Args:
        prompt: The prompt.
        scores: Score of each word.
        begins: Whether a word begins a stretch; the first one does in any case.
    """
    number = np.cumsum(begins) - begins[0]
    sizes = np.diff(prompt.starts).astype(np.float64)
    means = np.bincount(number, scores * sizes) / np.bincount(number, sizes)
    return means[number].astype(np.float32)
