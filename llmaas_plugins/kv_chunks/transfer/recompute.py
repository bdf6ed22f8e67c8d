"""Evaluate prompt tokens into sequence 0 without logits, bypassing ``Llama``'s bookkeeping."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import Tokens
from llmaas_plugins.failure_log import FailureLog

__all__ = ["evaluate"]


def evaluate(ctx: Any, tokens: Tokens, start: int, failures: FailureLog) -> int:
    """Evaluate tokens at positions from ``start`` on, where sequence 0 ends.

    Args:
        ctx: Context to evaluate in.
        tokens: Token ids, shape ``(n,)``.
        start: Position of the first token.
        failures: Log for a failed call.

    Returns:
        Number of evaluated leading tokens, less than ``n`` if a call failed or was aborted. The
        caller must then truncate the cells that the call left behind.
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
                failures.failed("llama_decode of %d tokens returned %d", batch.n_tokens, status)
                return done
    finally:
        llama_cpp.llama_batch_free(batch)
    return len(tokens)


def _fill(batch: Any, tokens: Tokens, start: int) -> None:
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens.tolist()):
        batch.token[i], batch.pos[i] = token, start + i
