"""Shortened prompts: never above the budget, at most a word below, and nothing protected lost."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import Llama

from llmaas_plugins.short_prompts.budget import Room, budget, shorten
from llmaas_plugins.short_prompts.protection import prompt_of
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of
from llmaas_plugins.short_prompts.words import divide

LONGEST_WORD = 32
pieces = st.sampled_from(
    [
        *("User:", "\nAssistant:", "\n", "\n\n", " ", "</s>", "<s>", "`", "```", '"', "“", "."),
        *(" Anna", " the", " cat", "sat", " 42", " a_b", "🙂", "我们", " Größe", "x" * 99, "\x00"),
    ]
)
characters = st.characters(exclude_categories=["Cs"])
"""The default of ``st.text``, whose first use takes seconds to find them by their codec."""
texts = st.lists(pieces | st.text(characters, max_size=8), max_size=60).map("".join)


@pytest.fixture(scope="module")
def llama(packaged_model):
    with contextlib.closing(Llama(str(packaged_model), verbose=False, vocab_only=True)) as llama:
        yield llama


@given(text=texts, share=st.floats(0.01, 1), seed=st.integers(0, 1 << 32))
def test_budgets_hold_and_nothing_protected_is_lost(llama, text, share, seed):
    tokens = np.array(llama.tokenize(text.encode(errors="replace"), special=True), np.int32)
    prompt = prompt_of(tokens, vocabulary_of(llama))
    scores = np.random.default_rng(seed).integers(0, 5, len(prompt.words)).astype(np.float32)
    most = budget(prompt, share)
    found = shorten(prompt, scores, most)
    sizes = np.diff(prompt.starts)
    whole = np.repeat(found.is_kept, sizes)
    assert found.tokens.tolist() == tokens[whole].tolist()
    assert found.is_crowded <= (2 * sizes[prompt.is_protected].sum() > most)
    stays = prompt.is_protected & ~(prompt.is_frequent & found.is_crowded)
    assert found.is_kept[stays].all()
    assert found.exceeds == (sizes[stays].sum() > most)
    if found.exceeds:
        assert (found.is_kept == stays).all()
    else:
        left = sizes[~found.is_kept]
        assert most - left.min(initial=LONGEST_WORD) < len(found.tokens) <= most or not len(left)
    assert len(found.tokens) + found.n_left_out == len(tokens)
    n_read = Room.of(prompt).n_read(most)
    assert n_read - LONGEST_WORD < len(found.tokens) <= n_read
    again = shorten(prompt, scores, most)
    assert again.tokens.tolist() == found.tokens.tolist()


@given(tokens=st.lists(st.integers(0, 4095), max_size=200))
def test_any_tokens_are_divided_into_whole_words(llama, tokens):
    found = divide(np.array(tokens, np.int32), vocabulary_of(llama))
    sizes = np.diff(found.starts)
    assert sizes.sum() == len(tokens)
    assert ((sizes > 0) & (sizes <= LONGEST_WORD)).all()
    assert len(found.texts) == len(sizes) == len(found.is_markup)
    controls = [at for at, token in enumerate(tokens) if token in (1, 2)]
    assert set(controls) <= set(found.starts[:-1].tolist())
    assert {at + 1 for at in controls} <= set(found.starts.tolist())


@given(text=texts)
def test_words_say_what_the_tokens_say(llama, text):
    tokens = llama.tokenize(text.encode(errors="replace"), add_bos=False)
    found = divide(np.array(tokens, np.int32), vocabulary_of(llama))
    said = llama.detokenize(tokens, special=True).decode(errors="replace")
    assert "".join(found.texts).removeprefix(" ") == said.removeprefix(" ")
