"""Scorer by attention: how much the question looks at a word (SpecPrefill, arXiv 2502.02789)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, NativeContext
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorers.evaluation import Evaluation, evaluation
from llmaas_plugins.short_prompts.scorers.seconds import MeasuredSeconds

__all__ = ["Attention"]

_MOST_QUERIES = 64
"""Last tokens of the prompt whose attention counts."""
_SMOOTHED = 13
"""Tokens over which attention is averaged, as in the paper's code: facts are longer than words."""


class Attention:
    """Scorer that reads the attention of the model at its narrowest level.

    SpecPrefill takes another model, and the largest of all heads and layers. This takes their mean,
    which the engine sums up as it computes.
    """

    uses_model = True

    def __init__(self, natives: Mapping[int, NativeContext]) -> None:
        """Take the contexts that the hook ``llmaas_native_context`` was given, by address."""
        self._natives = natives
        self._seconds = MeasuredSeconds()

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:
        """Return the mean attention that a word's tokens get, shape ``(n_words,)``.

        Raises:
            LlmaasError: The engine cannot evaluate the prompt, or its attention cannot be read.
        """
        started = time.perf_counter()
        tokens = prompt.tokens
        with evaluation(llama, self._natives, len(tokens), gives_logits=False) as one:
            found = _attention(one, prompt)
        self._seconds.add(len(tokens), time.perf_counter() - started)
        smooth = _smoothed(found)
        sums = np.add.reduceat(smooth, prompt.starts[:-1])
        return (sums / np.diff(prompt.starts)).astype(np.float32)

    def seconds(self, n_tokens: int) -> float | None:
        """Return about how long a prompt takes; None before the first one."""
        return self._seconds.at(n_tokens)


def _attention(one: Evaluation, prompt: Prompt) -> NDArray[np.float64]:
    """Return the attention that the last tokens pay to each token, shape ``(n_tokens,)``."""
    if one.native is None:
        raise LlmaasError(
            "attention cannot be read: the engine has no hook point. `llmaas doctor` says why."
        )
    tokens = prompt.tokens
    n = len(tokens)
    asked = int(prompt.starts[prompt.question])
    first = max(asked, n - _MOST_QUERIES, 1) if asked < n else n - 1
    one.read(tokens, 0, first)
    with one.native.density() as density:  # it sees nothing but the queries
        density.place(0, first)  # the cells before lie in the order of positions
        one.read(tokens, first, n)
        sums, counts = density.read(n)
    if not counts[:first].any():
        raise LlmaasError(
            "attention cannot be read: this model has none, or keeps it elsewhere. Choose another "
            "scorer."
        )
    return np.asarray(sums / np.maximum(counts, 1))


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each value and its neighbors."""
    window = np.ones(min(_SMOOTHED, len(values)))
    n_each = np.convolve(np.ones(len(values)), window, "same")
    return np.asarray(np.convolve(values, window, "same") / n_each)
