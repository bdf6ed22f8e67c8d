"""Evaluation of conversations: tokens become pairs of hidden states and targets.

The encoder has its own context, so the app's cells stay untouched; both contexts share the model's
weights. Keys are always computed with the whole model, even while apps use a narrowed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array

from llmaas_hooks import HiddenStates, LlmaasError, NativeContext, Tokens
from llmaas_hooks.native import States
from llmaas_hooks.own_models import own_contexts
from llmaas_plugins._native import logits_peek
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.model.identity import load_of, may_have_long_factors, rope_switch
from llmaas_plugins.model.lora import use_adapter_of

__all__ = ["EncodedConversation", "Encoder"]

_MOST_LOGITS_BYTES = 64 << 20
_MOST_BATCH = 512
_MOST_CELLS = 4096
_WHOLE = 0
"""Widest level, at which a model uses all its parts."""
_STEP = 256
"""llama.cpp rounds the number of cells of a context up to a multiple of this."""
_LEAST = np.finfo(np.float32).tiny
"""Smallest probability used, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedConversation:
    """Pairs of a conversation.

    Attributes:
        positions: Position of each pair's target in the conversation, shape (n,) int32.
        pairs: Pairs in order of position.
    """

    positions: npt.NDArray[np.int32]
    pairs: Pairs


class Encoder:
    """A separate context that evaluates conversations; ``close`` it, or use ``with``.

    Attributes:
        guard: Lock to hold while a batch is evaluated.
    """

    def __init__(
        self,
        llama: Any,
        natives: Mapping[int, NativeContext],
        key: States,
        n_threads: int = 0,
        n_batch: int = _MOST_BATCH,
    ) -> None:
        """Make a context that computes the same hidden states as the one of ``llama``.

        Args:
            llama: A ``llama_cpp.Llama`` made while the suite is active.
            natives: Contexts that the hook ``llmaas_native_context`` registered, by address.
            key: Kind of hidden states that serve as keys.
            n_threads: Number of threads; 0 takes the app's number.
            n_batch: Most tokens to evaluate at a time.

        Raises:
            LlmaasError: There is no memory for a context, or the engine has no hook point.
        """
        self._llama = llama
        self.guard: AbstractContextManager[object] = nullcontext()
        vocab = llama_cpp.llama_model_get_vocab(llama.model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._n_batch = max(1, min(n_batch, _MOST_LOGITS_BYTES // (4 * self._n_vocab)))
        params = _params(llama, self._n_batch, n_threads)
        with own_contexts():  # it serves no requests, so nobody adds cells to it
            ctx = llama_cpp.llama_init_from_model(llama.model, params)
        if ctx is None:
            raise LlmaasError(
                f"no memory for a context of {params.n_ctx} tokens to encode conversations in. "
                "Close other programs, or use a smaller model."
            )
        self._ctx = ctx
        try:
            self._states = self._prepare(natives.get(int(ctx)), key)
        except BaseException:
            llama_cpp.llama_free(ctx)
            raise
        self._n_ctx = int(llama_cpp.llama_n_ctx(ctx))
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)

    def close(self) -> None:
        """Free the context; idempotent."""
        if self._ctx is not None:
            self._states.close()
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._ctx)
            self._ctx = None

    def __enter__(self) -> Self:
        """Return the encoder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the encoder."""
        self.close()

    def encode(
        self,
        tokens: Tokens,
        between: Callable[[], None] = lambda: None,
        progress: Callable[[float], object] = lambda _share: None,
    ) -> EncodedConversation:
        """Return all pairs of a conversation (§3.1): (state after w_1…w_m, w_{m+1}).

        A conversation that is longer than the context is evaluated in windows that overlap by half.
        Every target after the first window then has at least half a window before it.

        Args:
            tokens: The conversation, shape (n,) int32; every token except the first is a target.
            between: Called between batches; an exception that it raises ends the encoding.
            progress: Called after each batch with the share of the work that is done.
        """
        windows = list(_windows(len(tokens), self._n_ctx))
        n_done, n_all = 0, sum(end - start for start, _, end in windows)

        def batch_done(n: int) -> None:
            nonlocal n_done
            n_done += n
            progress(n_done / n_all)

        positions, parts = [np.empty(0, np.int32)], []
        for start, skipped, end in windows:
            found = self._window(tokens[start:end], skipped - start, between, batch_done)
            parts.append(found)
            positions.append(np.arange(skipped + 1, skipped + 1 + len(found), dtype=np.int32))
        return EncodedConversation(np.concatenate(positions), _joined(parts, self._n_embd))

    @property
    def _n_embd(self) -> int:
        return int(llama_cpp.llama_model_n_embd(self._llama.model))

    def _prepare(self, native: NativeContext | None, key: States) -> HiddenStates:
        if native is None:
            raise LlmaasError(
                "cannot read hidden states: the engine has no hook point. `llmaas doctor` says why."
            )
        native.hold_level(_WHOLE)
        use_adapter_of(self._llama, self._ctx)
        return native.hidden_states(key, capacity=self._n_batch)

    def _window(
        self,
        tokens: Tokens,
        n_skipped: int,
        between: Callable[[], None],
        batch_done: Callable[[int], None],
    ) -> Pairs:
        """Return a window's pairs from row ``n_skipped`` on; the last token has no target."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
        rows = []
        for start in range(0, len(tokens), self._n_batch):
            between()
            rows.append(self._evaluate(tokens, start, n_skipped))
            batch_done(min(self._n_batch, len(tokens) - start))
        return _joined(rows, self._n_embd)

    def _evaluate(self, tokens: Tokens, start: int, n_skipped: int) -> Pairs:
        """Evaluate one batch and return its pairs."""
        part = tokens[start : start + self._n_batch]
        wanted = range(max(0, n_skipped - start), min(len(part), len(tokens) - 1 - start))
        batch = self._batch
        batch.n_tokens = len(part)
        for i, token in enumerate(part.tolist()):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i in wanted
        if len(wanted) == 0:
            batch.logits[len(part) - 1] = True  # llama.cpp requires at least one output
        with self.guard:
            status = llama_cpp.llama_decode(self._ctx, batch)
        if status:
            raise LlmaasError(f"llama_decode returned {status} while encoding a conversation")
        values = tokens[start + wanted.start + 1 : start + wanted.stop + 1]
        keys = self._states.take()[: len(wanted)]
        if len(keys) < len(wanted):
            raise ReferenceError("hidden states are no longer captured: the suite was deactivated")
        p_lm, p_max = self._probabilities(values)
        return Pairs(keys.astype(np.float16), np.ascontiguousarray(values), p_lm, p_max)

    def _probabilities(self, values: Tokens) -> tuple[npt.NDArray[np.float32], ...]:
        """Return the model's probability of each value, and that of its most likely token."""
        p_lm, p_max = np.empty((2, len(values)), np.float32)
        if len(values):
            pointer = llama_cpp.llama_get_logits(self._ctx)
            logits = as_array(pointer, shape=(len(values), self._n_vocab))
            for i, value in enumerate(values.tolist()):
                info = logits_peek(logits[i])
                p_lm[i] = max(np.exp(logits[i, value] - info.log_sum_exp), _LEAST)
                p_max[i] = info.max_prob
        return p_lm, p_max


def _params(llama: Any, n_batch: int, n_threads: int) -> Any:
    """Return the app's parameters, resized for a conversation and for a batch's logits."""
    params = type(llama.context_params).from_buffer_copy(llama.context_params)
    n_train = int(llama_cpp.llama_model_n_ctx_train(llama.model))
    n_ctx = min(n_train, max(int(llama.n_ctx()), n_batch), _MOST_CELLS)
    params.n_ctx = _with_same_factors(llama, n_ctx)
    params.n_batch = params.n_ubatch = min(n_batch, params.n_ctx)
    params.n_seq_max = 1
    params.embeddings = False
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.n_threads = params.n_threads_batch = n_threads or llama.n_threads
    return params


def _with_same_factors(llama: Any, n_ctx: int) -> int:
    """Return the nearest context size that selects the same RoPE factors as the app's context."""
    load = load_of(llama)
    switch = rope_switch(int(llama.model), load)
    is_long = int(llama.n_ctx()) > switch
    if is_long == (n_ctx > switch // _STEP * _STEP) or not may_have_long_factors(load):
        return n_ctx
    return switch + 1 if is_long else switch // _STEP * _STEP


def _windows(n_tokens: int, n_ctx: int) -> Iterator[tuple[int, int, int]]:
    """Yield each window's first token, its first row that no earlier window has, and its end."""
    end = min(n_tokens, n_ctx)
    if end > 1:
        yield 0, 0, end
    while end < n_tokens:
        start, done = end - n_ctx // 2, end - 1
        end = min(n_tokens, start + n_ctx)
        yield start, done, end


def _joined(parts: list[Pairs], n_embd: int) -> Pairs:
    none = Pairs(
        np.empty((0, n_embd), np.float16),
        np.empty(0, np.int32),
        np.empty(0, np.float32),
        np.empty(0, np.float32),
    )
    fields = ("keys", "values", "p_lm", "p_max")
    return Pairs(*(np.concatenate([getattr(p, f) for p in [none, *parts]]) for f in fields))
