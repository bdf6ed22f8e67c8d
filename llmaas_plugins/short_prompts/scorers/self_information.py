"""Scorer by self-information: how little the model expects a word (Selective Context)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import NativeContext
from llmaas_plugins._native import logits_peek
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorers.evaluation import evaluation
from llmaas_plugins.short_prompts.scorers.seconds import MeasuredSeconds

__all__ = ["SelfInformation"]


class SelfInformation:
    """Scorer that asks the model, at its narrowest level, how unlikely each word is."""

    uses_model = True

    def __init__(self, natives: Mapping[int, NativeContext]) -> None:
        """Take the contexts that the hook ``llmaas_native_context`` was given, by address."""
        self._natives = natives
        self._seconds = MeasuredSeconds()

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:
        """Return -log p of each word after the text before it, in nats, shape ``(n_words,)``.

        Raises:
            LlmaasError: The engine cannot evaluate the prompt.
            NativeError: The model gives values that are no numbers.
        """
        started = time.perf_counter()
        tokens = prompt.tokens
        found = np.zeros(len(tokens), np.float32)
        with evaluation(llama, self._natives, len(tokens), gives_logits=True) as one:
            for at, logits in one.predict(tokens):
                following = tokens[at + 1 : at + 1 + len(logits)].tolist()
                for i, token in enumerate(following):
                    found[at + 1 + i] = logits_peek(logits[i]).log_sum_exp - logits[i, token]
        self._seconds.add(len(tokens), time.perf_counter() - started)
        return np.add.reduceat(found, prompt.starts[:-1])

    def seconds(self, n_tokens: int) -> float | None:
        """Return about how long a prompt takes; None before the first one."""
        return self._seconds.at(n_tokens)
