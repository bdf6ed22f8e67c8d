"""Prompts and engines whose chunks are decoded straight into cells."""

from __future__ import annotations

import contextlib

import llama_cpp
import numpy as np
from llama_cpp import Llama
from restoring import (
    restore,
    transfer_of,
)

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
CASES = {
    "transposed": {},
    "flash": {"flash_attn": True},
    "q8_0": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
}
RNG = np.random.default_rng(7)
PROMPT = [1, *RNG.integers(300, 4000, 199).tolist()]  # 12 chunks and a half
FOREIGN = [1, *RNG.integers(300, 4000, 40).tolist()]
MORE = RNG.integers(300, 4000, 20).tolist()
TIERS = {"RAM": [], "disk": range(13), "mixed": [0, 3, 4, 5, 9, 12]}
"""Chunks that only the disk has."""


def opener(path, **settings):
    """Return a function that makes a new engine each time."""
    settings = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | settings
    return lambda: contextlib.closing(Llama(str(path), **settings))


def staged(suite, llama, prompt=PROMPT):
    """Restore through the buffers."""
    transfer_of(suite, llama)._loader._memory = None
    return restore(suite, llama, prompt)


def keep(suite, llama, n):
    """Fill the engine with ``n`` tokens of the prompt and other tokens after them."""
    restore(suite, llama, PROMPT[:n])
    llama.eval(FOREIGN[1:])


def go_on(llama):
    """Return the logits after the engine's tokens; nothing is saved."""
    llama.eval(MORE)
    row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(row, shape=(llama.n_vocab(),)).copy()


def assert_alike(suite, one, other):
    """Both engines continue with the same logits and the same attention to chunks."""
    assert np.array_equal(go_on(one), go_on(other))
    n = len(PROMPT) + len(MORE)
    looks = [np.array(transfer_of(suite, llama)._attention.take(n)) for llama in (one, other)]
    assert looks[0].all()
    assert np.array_equal(*looks)
