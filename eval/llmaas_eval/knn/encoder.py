"""Hidden states and probabilities of the reference model over whole conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tapped import TappedEngine
from llmaas_hooks.native import NativeContext, States

__all__ = ["STATES", "Encoded", "Encoder"]

STATES: tuple[States, ...] = ("ffn_input", "final_norm")


class Encoded(NamedTuple):
    """Context-target pairs of a text, one per row.

    Attributes:
        keys: Hidden states after each context, by tap; ``(n, n_embd)`` each.
        values: Next tokens; ``(n,)``.
        p_lm: The model's probability of the next token.
        p_max: The model's largest probability (MaxProb of Eq 33).
    """

    keys: dict[States, NDArray[np.float16]]
    values: NDArray[np.int32]
    p_lm: NDArray[np.float32]
    p_max: NDArray[np.float32]


class Encoder(TappedEngine):
    """Engine with both hidden-state taps open that encodes texts of any length in windows."""

    def _open(self, **settings: Any) -> NativeContext:
        context = super()._open(**settings)
        self._taps = {
            states: self.enter_context(context.hidden_states(states)) for states in STATES
        }
        return context

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with BOS if the model uses one."""
        return list(self._model.tokenize(text.encode(), True, False))

    def encode(self, tokens: Sequence[int]) -> Encoded:
        """Return the pairs of ``tokens``, without the context that is BOS alone.

        That context tells nothing about the text.
        """
        parts = [self._window(window, first) for window, first in _windows(tokens, self._n_ctx)]
        keys = {states: np.concatenate([part.keys[states] for part in parts]) for states in STATES}
        rest = (np.concatenate(columns) for columns in zip(*(p[1:] for p in parts), strict=True))
        return Encoded(keys, *rest)

    def _window(self, tokens: Sequence[int], first: int) -> Encoded:
        self._api.llama_memory_clear(self._memory, False)
        self._decode(tokens, 0, logits=True)
        rows = slice(first, len(tokens) - 1)
        keys = {states: tap.take()[rows].astype(np.float16) for states, tap in self._taps.items()}
        values = np.array(tokens[first + 1 :], np.int32)
        logits = np.ctypeslib.as_array(
            self._api.llama_get_logits(self._ctx), shape=(len(tokens), self._model.n_vocab())
        )[rows]
        peaks = logits.max(axis=1)
        p_max = 1 / np.exp(logits - peaks[:, None]).sum(axis=1)
        p_lm = np.exp(logits[np.arange(len(values)), values] - peaks) * p_max
        return Encoded(keys, values, p_lm, p_max)


def _windows(tokens: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield windows that overlap by half, each with its first row that is not in an earlier one."""
    half = size // 2
    yield tokens[:size], 1
    for start in range(half, len(tokens) - half, half):
        yield [tokens[0], *tokens[start + 1 : start + size]], half - 1
