"""Evaluation of a prompt by the model itself, in a context that exists only meanwhile.

Nothing that the app sees can change: its context, cells, logits, level and records stay as they
are, and taps on its context see nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array
from numpy.typing import NDArray

from llmaas_hooks import (
    LlmaasError,
    NativeContext,
    PluginError,
    Tokens,
    UnmetBudgetError,
    request_scope,
)
from llmaas_hooks.own_models import own_contexts
from llmaas_plugins.model.cell_sizes import CELL_STEP
from llmaas_plugins.model.lora import use_adapter_of

__all__ = ["Evaluation", "evaluation"]

_MOST_LOGITS_BYTES = 64 << 20
_MOST_BATCH = 512


class Evaluation:
    """Evaluation of one prompt.

    Attributes:
        native: The context's hook point; None if the engine has none.
    """

    def __init__(self, ctx: Any, batch: Any, most_batch: int, native: NativeContext | None) -> None:
        """Use a context without tokens, and a batch of so many."""
        self._ctx, self._batch, self._most_batch = ctx, batch, most_batch
        self._vocab_size = int(
            llama_cpp.llama_vocab_n_tokens(
                llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
            )
        )
        self.native = native

    def read(self, tokens: Tokens, start: int, end: int) -> None:
        """Evaluate the tokens of a prompt from ``start`` to ``end``, without logits.

        Raises:
            LlmaasError: The engine cannot evaluate them.
        """
        for at in range(start, end, self._most_batch):
            self._decode(tokens[at : min(at + self._most_batch, end)], at, gives_logits=False)

    def predict(self, tokens: Tokens) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Evaluate a prompt; yield the number of tokens read before, and the logits of a batch.

        Logits have the shape ``(n, n_vocab)``, a row for each token, and are valid until the next.

        Raises:
            LlmaasError: The engine cannot evaluate the tokens.
        """
        for at in range(0, len(tokens), self._most_batch):
            part = tokens[at : at + self._most_batch]
            self._decode(part, at, gives_logits=True)
            pointer = llama_cpp.llama_get_logits(self._ctx)
            yield at, as_array(pointer, shape=(len(part), self._vocab_size))

    def _decode(self, part: Tokens, start: int, *, gives_logits: bool) -> None:
        request_scope.check()
        batch, n = self._batch, len(part)
        batch.n_tokens = n
        as_array(batch.token, shape=(n,))[:] = part
        as_array(batch.pos, shape=(n,))[:] = np.arange(start, start + n)
        as_array(batch.n_seq_id, shape=(n,))[:] = 1
        as_array(batch.logits, shape=(n,))[:] = gives_logits
        batch.logits[n - 1] = 1  # llama.cpp requires at least one output
        for i in range(n):
            batch.seq_id[i][0] = 0
        status = llama_cpp.llama_decode(self._ctx, batch)
        if status:
            raise LlmaasError(f"llama_decode returned {status} while the words were scored")


@contextmanager
def evaluation(
    llama: Any, natives: Mapping[int, NativeContext], n_tokens: int, *, gives_logits: bool
) -> Iterator[Evaluation]:
    """Open a context for a prompt of ``n_tokens`` tokens, at the model's narrowest level.

    Args:
        llama: The ``llama_cpp.Llama`` that will read the prompt.
        natives: Contexts that the hook ``llmaas_native_context`` was given, by address.
        n_tokens: Tokens of the prompt.
        gives_logits: Whether every token gives logits.

    Raises:
        LlmaasError: There is no memory for the context.
    """
    params = _params(llama, n_tokens, _most_batch(llama) if gives_logits else _MOST_BATCH)
    with own_contexts():  # its batches are not the app's
        ctx = _made(llama, params)
        try:
            use_adapter_of(llama, ctx)
            native = natives.get(int(ctx))
            if native is not None:
                native.hold_level(native.n_levels - 1)
            batch = llama_cpp.llama_batch_init(int(params.n_batch), 0, 1)
            try:
                yield Evaluation(ctx, batch, int(params.n_batch), native)
            finally:
                llama_cpp.llama_batch_free(batch)
        finally:
            llama_cpp.llama_free(ctx)


def _made(llama: Any, params: Any) -> Any:
    """Return a context of our own.

    Raises:
        LlmaasError: There is no memory for it.
    """
    problem: LlmaasError | None = None
    try:
        ctx = llama_cpp.llama_init_from_model(llama.model, params)
    except PluginError as error:
        if not isinstance(error.__cause__, UnmetBudgetError):
            raise
        ctx, problem = None, error
    if ctx is None:
        raise LlmaasError(
            f"no memory for a context of {params.n_ctx} tokens to score words in. Choose a scorer "
            "that does not evaluate the prompt, or use a smaller model."
        ) from problem
    return ctx


def _params(llama: Any, n_tokens: int, most_batch: int) -> Any:
    """Return the app's parameters, for one prompt of ``n_tokens`` tokens."""
    params = type(llama.context_params).from_buffer_copy(llama.context_params)
    params.n_ctx = -(-n_tokens // CELL_STEP) * CELL_STEP
    params.n_batch = params.n_ubatch = min(most_batch, params.n_ctx)
    params.n_seq_max = 1
    params.embeddings = False
    return params


def _most_batch(llama: Any) -> int:
    """Return the most tokens of a batch of which all give logits."""
    room = _MOST_LOGITS_BYTES // (4 * int(llama.n_vocab()))
    return max(1, min(_MOST_BATCH, room))
