"""Log probabilities that a context computes in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_plugins.model.forward import log_softmax

__all__ = ["Part", "log_probabilities"]

Part = tuple[Sequence[int], int, int]
"""Tokens, position of the first one, and sequence."""


def log_probabilities(ctx: Any, n_vocab: int, parts: Sequence[Part]) -> NDArray[np.float32]:
    """Return log probabilities after each token of all parts, shape ``(n_tokens, n_vocab)``.

    Raises:
        RuntimeError: ``llama_decode`` failed.
    """
    n_tokens = sum(len(tokens) for tokens, _, _ in parts)
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    try:
        _fill(batch, parts)
        status = llama_cpp.llama_decode(ctx, batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status} for {n_tokens} tokens")
    rows = llama_cpp.llama_get_logits(ctx)
    return log_softmax(np.ctypeslib.as_array(rows, shape=(n_tokens, n_vocab)))


def _fill(batch: Any, parts: Sequence[Part]) -> None:
    batch.n_tokens = i = 0
    for tokens, start, sequence in parts:
        for position, token in enumerate(tokens, start):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = True
            i += 1
    batch.n_tokens = i
