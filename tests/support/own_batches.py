"""Batches of an app's own, in any sequence, without ``Llama``."""

from __future__ import annotations

import ctypes

import llama_cpp
import pytest


def batch_in(llama, sequence, n=4):
    """Decode a batch of the app's own in a sequence; return llama.cpp's status."""
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.logits[i] = 400 + i, i, i == n - 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    try:
        return llama_cpp.llama_decode(llama.ctx, batch)
    finally:
        llama_cpp.llama_batch_free(batch)


def process(llama, tokens, sequence=0):
    """Evaluate tokens by ``llama_process``, the successor of ``llama_decode``."""
    batch = llama_cpp.llama_batch_ext_init(llama.ctx)
    for position, token in enumerate(tokens):
        i = llama_cpp.llama_batch_ext_add_token(batch, sequence, token)
        llama_cpp.llama_batch_ext_set_pos(batch, i, ctypes.byref(ctypes.c_int32(position)))
        llama_cpp.llama_batch_ext_set_output_logits(batch, i, position == len(tokens) - 1)
    try:
        return llama_cpp.llama_process(llama.ctx, llama_cpp.LLAMA_PROCESS_TYPE_DECODE, batch)
    finally:
        llama_cpp.llama_batch_ext_free(batch)


has_process = pytest.mark.skipif(
    not hasattr(llama_cpp, "llama_process"), reason="llama_process is new in 0.3.36"
)
