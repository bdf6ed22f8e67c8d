"""Vocabularies, and prompts of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_plugins.short_prompts.protection import PROTECTION, prompt_of
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of


@pytest.fixture(scope="session")
def llama(packaged_model):
    llama = Llama(str(packaged_model), verbose=False, vocab_only=True)
    with contextlib.closing(llama):
        yield llama


@pytest.fixture(scope="session")
def tokens_of(llama):
    """Return a function that makes tokens of a text; control tokens in it count as such."""

    def tokens(text):
        return np.array(llama.tokenize(text.encode(), special=True), np.int32)

    return tokens


@pytest.fixture(scope="session")
def prompt(llama, tokens_of):
    """Return a function that makes a prompt of a text."""

    def make(text, protect=PROTECTION):
        return prompt_of(tokens_of(text), vocabulary_of(llama), protect)

    return make
