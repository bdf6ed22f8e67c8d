"""A bare ``llama_context`` that decodes batches of random tokens, for speed measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp

__all__ = ["Batches", "batches", "loaded"]


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[Any]:
    """Load a model with llama.cpp's default parameters; free it at the end."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None, path
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


class Batches:
    """A ``llama_context`` with a fixed array of random tokens to decode.

    Attributes:
        ctx: Address of the ``llama_context``.
    """

    def __init__(self, ctx: int, n_vocab: int) -> None:
        """Draw 1,024 random tokens below ``n_vocab``, to decode in ``ctx``."""
        self.ctx = ctx
        tokens = np.random.default_rng(0).integers(3, n_vocab, 1024)
        self._tokens = (llama_cpp.llama_token * len(tokens))(*tokens.tolist())

    def clear(self) -> None:
        """Remove all tokens from the context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), False)

    def cut(self, n: int) -> None:
        """Remove all but the first ``n`` tokens from the context."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, n, -1)

    def prefill(self, n: int) -> None:
        """Evaluate ``n`` tokens as one batch; call ``clear`` before."""
        self._decode(n)

    def generate(self, n: int = 8) -> None:
        """Evaluate ``n`` tokens one by one."""
        for _ in range(n):
            self._decode(1)

    def _decode(self, n: int) -> None:
        batch = llama_cpp.llama_batch_get_one(self._tokens, n)
        status = llama_cpp.llama_decode(self.ctx, batch)
        assert status == 0, status


@contextlib.contextmanager
def batches(model: Any, edit: Callable[[Any], None] = lambda _: None) -> Iterator[Batches]:
    """Open a context of 1,024 tokens on two threads with flash attention; free it at the end.

    Args:
        model: The loaded ``llama_model``.
        edit: Called with the ``llama_context_params`` before the context is created.
    """
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = 2
    params.flash_attn_type = 1
    edit(params)
    ctx = llama_cpp.llama_init_from_model(model, params)
    assert ctx is not None
    vocab = llama_cpp.llama_model_get_vocab(model)
    try:
        yield Batches(ctx, llama_cpp.llama_vocab_n_tokens(vocab))
    finally:
        llama_cpp.llama_free(ctx)
