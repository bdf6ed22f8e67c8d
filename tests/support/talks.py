"""Prompts of an app's contexts, asked for a few tokens."""

from __future__ import annotations

import contextlib

import numpy as np
from background import chunks_at_rest

from llmaas_hooks import serving_context

MODEL = "reference-7m-q8_0.gguf"
RNG = np.random.default_rng(1)
SYSTEM = [1, *RNG.integers(300, 4000, 79).tolist()]
CHAT = [*SYSTEM, *RNG.integers(300, 4000, 30).tolist()]
MAIL = [*SYSTEM, *RNG.integers(300, 4000, 45).tolist()]
FOREIGN = [1, *RNG.integers(300, 4000, 39).tolist()]


def ask(llama, tokens, n=6, context_id=None):
    """Return ``n`` greedy tokens."""
    named = contextlib.nullcontext() if context_id is None else serving_context(context_id)
    with named:
        generator = llama.generate(tokens, temp=0.0)
        found = [next(generator) for _ in range(n)]
        generator.close()
    return found


def store_of(suite):
    suite.settle()
    store = suite.plugin("kv_chunks")._store
    store.flush()  # waits for the background save
    return store


def report(suite):
    """Return the plugin's status; nothing may be pinned between requests."""
    store = chunks_at_rest(suite)
    assert all(chunk.pins == 0 for chunk in store.tree)
    return suite.status()["plugins"]["kv_chunks"]
