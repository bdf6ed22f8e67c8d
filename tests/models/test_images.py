"""Cells that no tokens explain, above all images, which chat handlers evaluate inside C.

No tiny vision model is available, so the handler here repeats the steps of llama_cpp's handlers.
It clears the cells, evaluates text with ``Llama.eval``, evaluates an image's embeddings with the C
library, moves ``Llama.n_tokens`` past them, and completes.
"""

from __future__ import annotations

import copy
import ctypes

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaRAMCache
from llama_cpp import llama_cpp as bindings
from switching import OTHER, PROMPT, Conversation, ask

N_EMBD, N_IMAGE = 256, 24
TEXT = PROMPT[:60]
QUESTION = [*range(700, 720)]


class Handler:
    """Chat handler in llama_cpp's style; ``image`` is the next image's seed, or None."""

    image = None

    def __call__(self, *, llama, **_):
        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.eval(TEXT)
        if self.image is not None:
            show(llama, self.image)
        llama.eval(QUESTION)
        prompt = llama.input_ids[: llama.n_tokens].tolist()
        return llama.create_completion(prompt, max_tokens=6, temperature=0)


def show(llama, seed):
    """Evaluate an image's embeddings without Python's knowledge."""
    values = np.random.default_rng(seed).normal(size=(N_IMAGE, N_EMBD)).astype(np.float32)
    batch = llama_cpp.llama_batch_init(N_IMAGE, N_EMBD, 1)
    batch.n_tokens = N_IMAGE
    ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
    for i in range(N_IMAGE):
        batch.pos[i], batch.n_seq_id[i], batch.logits[i] = llama.n_tokens + i, 1, 0
        batch.seq_id[i][0] = 0
    decode = bindings._lib.llama_decode
    assert decode(ctypes.c_void_p(llama.ctx), batch) == 0
    llama_cpp.llama_batch_free(batch)
    llama.n_tokens += N_IMAGE


def chat(llama, image):
    llama.chat_handler.image = image
    reply = llama.create_chat_completion([{"role": "user", "content": "What is it?"}])
    return reply["choices"][0]["text"]


def conversation_with_images(llama):
    """Yield replies to images, to text, and to texts that begin like the cells of an image."""
    found = [chat(llama, image) for image in (1, 2, None, 1)]
    found.append(ask(llama, llama.input_ids[: llama.n_tokens].tolist(), 4)[0])
    return [*found, *(ask(llama, prompt, 4)[0] for prompt in (OTHER, PROMPT, OTHER))]


@pytest.fixture
def talk(family):
    return Conversation(family("llama"))


def test_images_are_vanillas(talk, suite, report, caplog):
    with talk.open() as llama:
        llama.chat_handler = Handler()  # an app may set it at any time
        expected = conversation_with_images(llama)
    active = suite()
    with talk.open() as llama:
        ask(llama, PROMPT, 4)  # served so far
        llama.chat_handler = Handler()
        assert conversation_with_images(llama) == expected
        assert report(active)["restores"] == 3  # restores of pure text only
    assert caplog.text.count("llama.gguf: the app changed cells without Llama's knowledge") == 1
    active = suite()
    with talk.open() as llama:
        llama.chat_handler = Handler()
        assert conversation_with_images(llama) == expected  # nothing wrong was stored


def test_no_chunk_names_an_image(talk, suite, report):
    active = suite()
    with talk.open() as llama:
        llama.chat_handler = Handler()
        chat(llama, 1)
        assert report(active)["saves"] == 0
        chat(llama, None)
        assert report(active)["saves"] == 1


@pytest.mark.parametrize("origin", ["this process", "elsewhere"])
def test_only_states_that_were_seen_being_made_are_stored(talk, suite, report, origin):
    """``Llama.load_state`` accepts any bytes, even those of other weights."""
    with talk.open() as llama:
        expected = goes_on(llama, origin)
    active = suite()
    with talk.open() as llama:
        assert goes_on(llama, origin) == expected
        assert report(active)["saves"] == (3 if origin == "this process" else 2)


def goes_on(llama, origin):
    """Return an answer from a state."""
    ask(llama, PROMPT, 2)
    state = llama.save_state()
    ask(llama, QUESTION, 2)
    llama.load_state(state if origin == "this process" else copy.copy(state))
    return ask(llama, [*PROMPT, *QUESTION], 6)[0]


def test_the_cache_of_llama_cpp_goes_on(talk, suite, report):
    def answers(llama):
        llama.set_cache(LlamaRAMCache())
        text = " a boat came back to it" * 4
        return [
            llama.create_completion(prompt, max_tokens=4, temperature=0)["choices"][0]["text"]
            for prompt in (text, " something else" * 9, f"{text} and left")
        ]

    with talk.open() as llama:
        expected = answers(llama)
    active = suite()
    with talk.open() as llama:
        assert answers(llama) == expected
        assert report(active)["saves"] == 3
