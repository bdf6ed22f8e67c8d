"""Texts that are refused before llama.cpp tokenizes them."""

from __future__ import annotations

import pytest
from llama_cpp import Llama

from llmaas_plugins.chats.prompts import prompt_tokens
from llmaas_plugins.chats.text_limit import TextTooLongError, check_text

LONGEST = len("▁International".encode())
"""Bytes of the longest token."""
N_CTX, LARGE = 256, 1 << 20


@pytest.fixture(scope="module")
def llama(packaged_model):
    llama = Llama(str(packaged_model), n_ctx=N_CTX, verbose=False, n_threads=1, vocab_only=True)
    yield llama
    llama.close()


@pytest.fixture
def large(llama, monkeypatch):
    """Return an engine with a context into which all of the texts fit."""
    monkeypatch.setattr(llama, "n_ctx", lambda: LARGE)
    return llama


def test_a_text_that_may_fit_is_taken(llama):
    text = b" International" * N_CTX
    assert len(llama.tokenize(text[1:], add_bos=False)) == llama.n_ctx() == N_CTX
    check_text(llama, text)
    check_text(llama, b"x" * N_CTX * LONGEST)


def test_a_text_that_cannot_fit_is_refused_as_llama_cpp_refuses_it(llama):
    expected = r"^Requested tokens \(257\) exceed context window of 256$"
    with pytest.raises(TextTooLongError, match=expected) as caught:
        check_text(llama, b"x" * (N_CTX * LONGEST + 1))
    assert caught.value.n_tokens == 257
    asked = [{"role": "user", "content": "x" * N_CTX * LONGEST}]
    assert len(prompt_tokens(llama, asked, {})) > N_CTX
    with pytest.raises(TextTooLongError):
        prompt_tokens(llama, asked, {}, is_limited=True)


@pytest.mark.parametrize("character", ["🙂", "<", "\u0301"])
def test_long_runs_of_characters_without_a_token_are_refused(large, character):
    """llama.cpp would take a time that grows with the square of their number."""
    n_bytes = len(character.encode())
    n = int(((1 << 30) / n_bytes) ** 0.5)
    check_text(large, (character * n).encode())
    with pytest.raises(TextTooLongError, match="characters in a row that the model's") as caught:
        check_text(large, (character * (n + 100)).encode())
    assert caught.value.n_tokens == 0


def test_many_such_characters_are_taken_if_others_are_between_them(large):
    check_text(large, "a smile 🙂\n".encode() * 20_000)
    check_text(large, "🙂 ".encode() * 100_000)
    check_text(large, b"x" * 900_000)
    check_text(large, "🙂".encode() * 1000 + b"x" * 900_000)


def test_other_tokenizers_are_not_limited(llama, monkeypatch):
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_vocab_type", lambda _: 3)  # WordPiece
    check_text(llama, b" " * LARGE)
