"""A prepared model whose prompts and answers are evaluated at levels of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp
from numpy.typing import NDArray

from llmaas_eval.evaluated import log_probabilities
from llmaas_hooks import Tokens, hookimpl
from llmaas_hooks.native import NativeContext
from llmaas_plugins import elastic
from llmaas_plugins.activation import activate
from llmaas_plugins.model.forward import log_softmax

__all__ = ["Engine", "LogP", "as_tokens", "opened"]

LogP = NDArray[np.float32]
"""Log probabilities after each of some tokens, shape ``(n_tokens, n_vocab)``."""


def as_tokens(values: Sequence[int]) -> Tokens:
    """Return token ids as an array."""
    return np.array(values, np.int32)


class Engine:
    """A context of one sequence on one thread, whose levels can be chosen for each batch.

    Attributes:
        path: The prepared model.
        llama: The model and its context, for scorers.
        natives: Hook points of all contexts, by address, for scorers.
    """

    def __init__(self, path: Path, llama: Llama, natives: Mapping[int, NativeContext]) -> None:
        """Use the context of a ``Llama``."""
        self.path, self.llama, self.natives = path, llama, natives
        self._ctx = llama.ctx
        self._memory = llama_cpp.llama_get_memory(self._ctx)

    def tokens(self, text: str) -> Tokens:
        """Return the tokens of a text that begins a line."""
        return as_tokens(self.llama.tokenize(text.encode(), add_bos=False))

    def pieces(self, tokens: Tokens) -> list[str]:
        """Return the text of each token, with its blanks."""
        return [
            self.llama.detokenize([token], special=True).decode("utf-8", "replace")
            for token in tokens.tolist()
        ]

    def read(self, tokens: Tokens, level: float = 1.0, at: int = 0) -> LogP:
        """Drop the cells from position ``at`` on, and evaluate tokens there, at a level.

        Returns:
            Log probabilities after each token.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        self._drop(at)
        with elastic.level(level):
            return log_probabilities(self._ctx, self.llama.n_vocab(), [(tokens.tolist(), at, 0)])

    def prefill(self, tokens: Tokens, level: float = 1.0, at: int = 0) -> LogP:
        """Do as ``read`` does, which takes longer; return the last log probabilities, one row.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        self._drop(at)
        given = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())
        with elastic.level(level):
            status = llama_cpp.llama_decode(
                self._ctx, llama_cpp.llama_batch_get_one(given, len(tokens))
            )
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(tokens)} tokens at {at}")
        row = llama_cpp.llama_get_logits_ith(self._ctx, -1)
        return log_softmax(np.ctypeslib.as_array(row, shape=(1, self.llama.n_vocab())))

    def followed(self, prompt: Tokens, rest: Tokens) -> LogP:
        """Return the whole model's log probabilities of each token of a text after a prompt.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        first = self.prefill(prompt)
        return np.concatenate([first, self.read(rest[:-1], 1.0, len(prompt))])

    def answer(self, prompt: Tokens, n: int) -> Tokens:
        """Return the first ``n`` tokens of the whole model's greedy answer.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        tokens = [int(self.prefill(prompt).argmax())]
        while len(tokens) < n:
            at = len(prompt) + len(tokens) - 1
            tokens.append(int(self.prefill(as_tokens(tokens[-1:]), 1.0, at).argmax()))
        return as_tokens(tokens)

    def _drop(self, at: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, 0, at, -1)


class _Natives:
    """Plugin that keeps the hook points of contexts."""

    def __init__(self) -> None:
        self.contexts: dict[int, NativeContext] = {}

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep a context's hook point."""
        self.contexts[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context."""
        self.contexts.pop(ctx, None)


@contextlib.contextmanager
def opened(path: Path, n_ctx: int) -> Iterator[Engine]:
    """Open a prepared model with a context of ``n_ctx`` tokens; close it at the end."""
    natives = _Natives()
    settings: dict[str, Any] = {"on_error": "raise", "plugins": {"elastic": {}}}
    with activate(settings, {"eval": natives}), contextlib.closing(_llama(path, n_ctx)) as llama:
        yield Engine(path, llama, natives.contexts)


def _llama(path: Path, n_ctx: int) -> Llama:
    return Llama(
        str(path),
        n_ctx=n_ctx,
        n_batch=n_ctx,
        n_ubatch=n_ctx,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )
