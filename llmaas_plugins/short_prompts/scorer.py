"""Interface of scorers: which words of a prompt an answer needs most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens

__all__ = ["Prompt", "Scorer"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt, divided into words. A word is kept or left out as a whole.

    Attributes:
        tokens: Token ids of the model, shape ``(n_tokens,)``.
        starts: First token of each word, and the number of tokens, shape ``(n_words + 1,)`` int32.
            Words cover the prompt without gaps; the blanks before a word belong to it.
        words: Text of each word, with its blanks; empty for a token without a text, such as one
            that begins a turn of a chat.
        is_protected: Whether a word must be kept, shape ``(n_words,)``.
        is_frequent: Whether a protected word is of a kind that texts may be full of, such as
            numbers and names; shape ``(n_words,)``.
        question: First word of the question: the part at the end that the answer is about.
    """

    tokens: Tokens
    starts: NDArray[np.int32]
    words: tuple[str, ...]
    is_protected: NDArray[np.bool_]
    is_frequent: NDArray[np.bool_]
    question: int


class Scorer(Protocol):
    """Estimate of how much an answer needs each word."""

    @property
    def uses_model(self) -> bool:
        """Whether the model itself evaluates the prompt for it, in a context of its own."""

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:
        """Return a number for each word, shape ``(n_words,)``; words with large ones are kept.

        Args:
            prompt: The prompt.
            llama: The ``llama_cpp.Llama`` that will read it.
        """

    def seconds(self, n_tokens: int) -> float | None:
        """Return about how long a prompt of so many tokens takes.

        None if no prompt was scored, and it takes the model's narrowest level for a prompt, about.
        """
