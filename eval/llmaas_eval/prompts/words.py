"""A prompt as ``short_prompts`` divides it, and the tokens that it keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.engine import Engine
from llmaas_hooks import Tokens
from llmaas_plugins.short_prompts.budget import budget, shorten
from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

__all__ = ["only_question", "shortened", "words_of"]


def words_of(engine: Engine, tokens: Tokens) -> Prompt:
    """Divide a prompt into words, with those protected that the plugin protects."""
    return prompt_of(tokens, vocabulary_of(engine.llama))


def only_question(prompt: Prompt, n_question: int) -> Prompt:
    """Return the prompt with its last words protected, which are the question, and no others.

    Args:
        prompt: The prompt.
        n_question: Number of the prompt's last tokens that are the question.
    """
    first = int(np.searchsorted(prompt.starts, len(prompt.tokens) - n_question, side="right")) - 1
    is_protected = np.arange(len(prompt.words)) >= first
    nothing = np.zeros_like(is_protected)
    return Prompt(prompt.tokens, prompt.starts, prompt.words, is_protected, nothing, first)


def shortened(prompt: Prompt, scores: NDArray[np.float32], share: float) -> Tokens:
    """Return the tokens that a share of the prompt keeps."""
    return shorten(prompt, scores, budget(prompt, share)).tokens
