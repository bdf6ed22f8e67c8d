"""The reference model at work on whole conversations: hidden states and probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import hookimpl
from llmaas_hooks.native import NativeContext, States

__all__ = ["STATES", "Encoded", "Encoder"]

STATES: tuple[States, ...] = ("ffn_input", "final_norm")
_N_CTX = 1024


class Encoded(NamedTuple):
    """Context-target pairs of a text; row by row.

    Attributes:
        keys: Hidden states after a context, of either kind; ``(n, n_embd)`` each.
        values: The token that comes next.
        p_lm: The model's own probability of that token.
        p_max: Its largest probability (MaxProb of Eq 33).
    """

    keys: dict[States, NDArray[np.float16]]
    values: NDArray[np.int32]
    p_lm: NDArray[np.float32]
    p_max: NDArray[np.float32]


class _Tapped:
    """Keeps the context that it is told of."""

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep it."""
        self.context = context


class Encoder(contextlib.ExitStack):
    """Stock llama.cpp on one thread with both taps open."""

    def __init__(self, model: Path) -> None:
        """For texts of any length, by windows of 1,024 tokens."""
        super().__init__()
        self._path = model

    def __enter__(self) -> Self:
        """Load the model."""
        super().__enter__()
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self._open()
            undo.pop_all()
        return self

    def _open(self) -> None:
        from llama_cpp import _internals, llama_cpp
        from llama_cpp._logger import set_verbose

        from llmaas_plugins import activate

        set_verbose(False)
        self._api: Any = llama_cpp
        tapped = _Tapped()
        self.enter_context(activate({"plugins": {}, "on_error": "raise"}, {"tapped": tapped}))
        self._model = _internals.LlamaModel(
            path_model=str(self._path),
            params=llama_cpp.llama_model_default_params(),
            verbose=False,
        )
        self.callback(self._model.close)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _N_CTX
        params.n_threads = params.n_threads_batch = 1
        context = _internals.LlamaContext(model=self._model, params=params, verbose=False)
        self.callback(context.close)
        self._ctx: Any = context.ctx
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._batch = llama_cpp.llama_batch_init(_N_CTX, 0, 1)
        self.callback(llama_cpp.llama_batch_free, self._batch)
        self._taps = {
            states: self.enter_context(tapped.context.hidden_states(states)) for states in STATES
        }

    def tokens(self, text: str) -> list[int]:
        """Of ``text``, with what a sequence begins with."""
        return list(self._model.tokenize(text.encode(), True, False))

    def encode(self, tokens: Sequence[int]) -> Encoded:
        """Pairs of ``tokens``; what tells nothing, the beginning of a sequence alone, is none."""
        parts = [self._window(window, first) for window, first in _windows(tokens)]
        keys = {states: np.concatenate([part.keys[states] for part in parts]) for states in STATES}
        rest = (np.concatenate(columns) for columns in zip(*(p[1:] for p in parts), strict=True))
        return Encoded(keys, *rest)

    def _window(self, tokens: Sequence[int], first: int) -> Encoded:
        self._decode(tokens)
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

    def _decode(self, tokens: Sequence[int]) -> None:
        self._api.llama_memory_clear(self._memory, False)
        for i, token in enumerate(tokens):
            self._batch.token[i], self._batch.pos[i] = token, i
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
            self._batch.logits[i] = True
        self._batch.n_tokens = len(tokens)
        status = self._api.llama_decode(self._ctx, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(tokens)} tokens")


def _windows(tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    """Windows that overlap by half, and the first row of each that no earlier one has."""
    half = _N_CTX // 2
    yield tokens[:_N_CTX], 1
    for start in range(half, len(tokens) - half, half):
        yield [tokens[0], *tokens[start + 1 : start + _N_CTX]], half - 1
