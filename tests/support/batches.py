"""A conversation in batches of many sizes."""

from __future__ import annotations

import llama_cpp
from claiming import decode

TOKENS = tuple(range(300, 420))
PIECES = (50, 40, 27, 1, 1, 1)
CONTEXT = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 32}
"""Context settings with room for the conversation; larger batches take several ubatches."""


def pieces(tokens=TOKENS, lengths=PIECES):
    """Return a conversation as batches of tokens, each with its start position."""
    start = 0
    for length in lengths:
        yield tokens[start : start + length], start
        start += length


def feed(ctx, batches, after=lambda _start: None):
    """Evaluate each batch from its start position, dropping cells that are already there."""
    for tokens, start in batches:
        memory = llama_cpp.llama_get_memory(ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)
        assert decode(ctx, tokens, start) == 0
        after(start)
