"""Evaluating tokens of a prompt into sequence 0, beside ``Llama``'s books and without logits."""

from __future__ import annotations

import logging
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import Tokens

__all__ = ["evaluate"]

_log = logging.getLogger("llmaas.kv_chunks")


def evaluate(ctx: Any, tokens: Tokens, start: int) -> int:
    """Put tokens at positions from ``start`` on, where sequence 0 ends.

    Returns:
        How many leading ones are in now; fewer than given when a call failed or was aborted. What
        it left behind is to be truncated.
    """
    n_batch = min(len(tokens), llama_cpp.llama_n_batch(ctx))
    batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
    try:
        for i in range(n_batch):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 0
        for done in range(0, len(tokens), n_batch):
            _fill(batch, tokens[done : done + n_batch], start + done)
            status = llama_cpp.llama_decode(ctx, batch)
            if status != 0:
                _log.warning("llama_decode of %d tokens gave %d", batch.n_tokens, status)
                return done
    finally:
        llama_cpp.llama_batch_free(batch)
    return len(tokens)


def _fill(batch: Any, tokens: Tokens, start: int) -> None:
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens.tolist()):
        batch.token[i], batch.pos[i] = token, start + i
