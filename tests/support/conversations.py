"""Conversations whose every reply is known: what stock llama.cpp says, token by token.

Tokens are evaluated one at a time, so cells are the same to the last bit no matter which of them
were restored and which evaluated again; so equal texts, and equal bytes, can be demanded.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import llama_cpp
import numpy as np

SUPPORT = str(Path(__file__).parent)
"""For the PYTHONPATH of a child that imports this module."""
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
    """Whether messages, or None without a context, are those after one more operation.

    It is a new context, a call, whatever the reply, or a deletion after the last one.
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
    """How the conversation of ``app`` begins."""
    return f"{app} is here."


def vanilla(model, app):
    """Messages, and a digest of the cells, before the first call and after each."""
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
    """Hash of sequence 0's cells."""
    n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = (llama_cpp.ctypes.c_uint8 * n_bytes)()
    llama_cpp.llama_state_seq_get_data(llama.ctx, blob, n_bytes, 0)
    return hashlib.sha256(np.frombuffer(blob, np.uint8)).hexdigest()
