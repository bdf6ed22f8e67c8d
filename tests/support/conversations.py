"""Conversations whose replies are known in advance: those of stock llama.cpp.

Tokens are evaluated one at a time, so that cells are bit-identical whether they were restored or
evaluated again. Tests can therefore demand equal texts and equal bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import llama_cpp
import numpy as np

SUPPORT = str(Path(__file__).parent)
"""PYTHONPATH entry for a child that imports this module."""
APPS = ("Anna", "Bert", "Cleo", "Dora")
PROMPTS = (
    "Tell me about your dog and where you found it.",
    "Why is that? I do not believe a word of it.",
    "My phone is broken, and I want to fly to Rome.",
    "One pizza with cheese, please.",
    "What will you do now?",
)
ENGINE = {
    "n_ctx": 512, "n_ubatch": 1, "n_threads": 1, "n_threads_batch": 1,
    "flash_attn": True, "verbose": False,
}  # fmt: skip
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def follows(before, after, app):
    """Return whether ``after`` can follow ``before`` by one more operation.

    The operation creates a context, calls the model (any reply is accepted), or deletes the context
    after its last call. None means that there is no context.
    """
    if before is None:
        return after == [{"role": "system", "content": system_prompt(app)}]
    n_calls = len(before) // 2
    if n_calls == len(PROMPTS):
        return after is None
    if after is None or after[:-2] != before:
        return False
    asked, said = after[-2:]
    roles = (asked["role"], said["role"])
    return (asked["content"], roles) == (PROMPTS[n_calls], ("user", "assistant"))


def system_prompt(app):
    """Return the first message of ``app``'s conversation."""
    return f"{app} is here."


def vanilla(model, app):
    """Return messages and a digest of the cells, before the first call and after each call."""
    llama = llama_cpp.Llama(str(model), **ENGINE)
    messages = [{"role": "system", "content": system_prompt(app)}]
    said = [(list(messages), None)]
    for prompt in PROMPTS:
        messages.append({"role": "user", "content": prompt})
        reply = llama.create_chat_completion(messages=messages, **GREEDY)
        text = reply["choices"][0]["message"]["content"].strip()
        messages.append({"role": "assistant", "content": text})
        said.append((list(messages), digest(llama)))
    llama.close()
    return said


def digest(llama):
    """Return a hash of sequence 0's cells."""
    n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = (llama_cpp.ctypes.c_uint8 * n_bytes)()
    llama_cpp.llama_state_seq_get_data(llama.ctx, blob, n_bytes, 0)
    return hashlib.sha256(np.frombuffer(blob, np.uint8)).hexdigest()
