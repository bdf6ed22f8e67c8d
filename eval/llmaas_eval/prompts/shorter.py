"""Prompts shortened by each scorer to the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llmaas_eval.prompts.scorers import Material, Scorer
from llmaas_eval.prompts.words import only_question, shortened
from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.scorer import Prompt

__all__ = ["PROTECTED", "QUESTION", "SHARES", "WHOLE", "Shorter", "shorter"]

SHARES = (0.3, 0.5, 0.7)
WHOLE = "whole prompt"
PROTECTED, QUESTION = "as the plugin", "question only"
"""Words that every scorer must keep: those that the plugin protects, or only the question."""


class Shorter(NamedTuple):
    """A prompt that was shortened.

    Attributes:
        scorer: Name of the scorer, or ``WHOLE``.
        share: Largest share of the prompt's tokens.
        protection: ``PROTECTED`` or ``QUESTION``.
        kept: Share of its tokens that was really kept; protected words may exceed the budget.
        tokens: Tokens that were kept.
    """

    scorer: str
    share: float
    protection: str
    kept: float
    tokens: Tokens


def shorter(
    prompt: Prompt,
    n_question: int,
    material: Material,
    scorers: Mapping[str, Scorer],
    shares: Sequence[float],
) -> Iterator[Shorter]:
    """Yield the whole prompt, and the prompt shortened in all ways.

    Args:
        prompt: The prompt.
        n_question: Number of its last tokens that are the question.
        material: All that scorers may use.
        scorers: Scorers by name.
        shares: Shares of the prompt's tokens.
    """
    yield Shorter(WHOLE, 1.0, "", 1.0, prompt.tokens)
    ways = (PROTECTED, prompt), (QUESTION, only_question(prompt, n_question))
    for scorer, score in scorers.items():
        scores = score(prompt, material)
        for protection, one in ways:
            for share in shares:
                kept = shortened(one, scores, share)
                part = len(kept) / len(prompt.tokens)
                yield Shorter(scorer, share, protection, part, kept)
