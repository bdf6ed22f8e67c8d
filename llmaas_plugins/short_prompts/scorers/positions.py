"""Scorers that know only where a word stands: rivals of those that read it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.short_prompts.scorer import Prompt

__all__ = ["First", "Last", "Random"]


class First:
    """Scorer that prefers the words at the beginning."""

    uses_model = False

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:  # noqa: ARG002
        """Return larger numbers for earlier words, shape ``(n_words,)``."""
        return -np.arange(len(prompt.words), dtype=np.float32)

    def seconds(self, n_tokens: int) -> float:  # noqa: ARG002
        """Return 0."""
        return 0.0


class Last:
    """Scorer that prefers the words at the end."""

    uses_model = False

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:  # noqa: ARG002
        """Return larger numbers for later words, shape ``(n_words,)``."""
        return np.arange(len(prompt.words), dtype=np.float32)

    def seconds(self, n_tokens: int) -> float:  # noqa: ARG002
        """Return 0."""
        return 0.0


class Random:
    """Scorer that draws lots, the same ones for the same prompt."""

    uses_model = False

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:  # noqa: ARG002
        """Return random numbers from 0 to 1, shape ``(n_words,)``, drawn from the prompt's hash."""
        digest = hashlib.blake2b(prompt.tokens.tobytes(), digest_size=16).digest()
        chance = np.random.default_rng(int.from_bytes(digest, "little"))
        return chance.random(len(prompt.words), np.float32)

    def seconds(self, n_tokens: int) -> float:  # noqa: ARG002
        """Return 0."""
        return 0.0
