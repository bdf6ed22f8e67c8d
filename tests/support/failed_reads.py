"""Answers before, during and after a time in which weights cannot be read from their files."""

from __future__ import annotations

import ctypes

import numpy as np
from claiming import OFF, decode, step
from forking import in_child
from llama_cpp import llama_cpp as raw
from unreadable import unreadable

N_ANSWER = 37
"""Tokens of an answer; a failed batch takes the cells behind them."""
CONTEXT = {"flash_attn_type": OFF}
"""Settings with which attention multiplies also the cells that it does not see, by 0."""


def forget(ctx):
    """Free all cells, but keep what they hold, as ``Llama.reset`` does."""
    assert raw.llama_memory_seq_rm(raw.llama_get_memory(ctx), 0, -1, -1)


def answer(ctx, n_prompt=35):
    """Return the logits of a prompt and of single tokens after it."""
    forget(ctx)
    prompt, rest = range(5, 5 + n_prompt), range(5 + n_prompt, 5 + N_ANSWER)
    first = [step(ctx, prompt, 0)] if n_prompt else []
    return np.concatenate([*first, *(step(ctx, [token], token - 5) for token in rest)])


def fails(ctx, path, tokens):
    """Return whether a batch fails while a file cannot be read."""
    with unreadable(path):
        return decode(ctx, tokens, N_ANSWER) == -3


def check_in_a_child_and_here(work):
    """Run ``work`` in a forked child, and then in this process."""
    assert in_child(work) == 0
    work()


def fill_with_nan(ctx):
    """Leave NaN in the memory that a token is computed in, and in the cell behind the answer."""
    n_embd = raw.llama_model_n_embd(raw.llama_get_model(ctx))
    batch = raw.llama_batch_init(1, n_embd, 1)
    ctypes.memset(batch.embd, 0xFF, n_embd * 4)
    batch.n_tokens, batch.pos[0], batch.n_seq_id[0] = 1, N_ANSWER, 1
    batch.seq_id[0][0], batch.logits[0] = 0, True
    assert raw.llama_decode(ctx, batch) == 0
    raw.llama_batch_free(batch)
    assert raw.llama_memory_seq_rm(raw.llama_get_memory(ctx), 0, N_ANSWER, -1)
