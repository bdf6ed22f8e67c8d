"""Texts that are refused before llama.cpp tokenizes them."""

from __future__ import annotations

import contextlib

import pytest
from gguf import TokenType
from llama_cpp import Llama
from vocabularies import LARGE, byte_tokens, opened_vocabulary

from llmaas_plugins.chats import text_limit
from llmaas_plugins.chats.prompts import prompt_tokens
from llmaas_plugins.chats.text_limit import TextTooLongError, check_text

LONGEST = len("▁International".encode())
"""Bytes of the longest token."""
N_CTX = 256


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


@pytest.fixture
def open_vocabulary(tmp_path):
    """Return a function that opens a file with this vocabulary and nothing else."""
    with contextlib.ExitStack() as stack:

        def opened(*args, **fields):
            llama = opened_vocabulary(tmp_path / "model.gguf", *args, **fields)
            return stack.enter_context(contextlib.closing(llama))

        yield opened


@pytest.mark.parametrize("pre", ["gpt-4o", "deepseek-v3", "tekken"])
def test_runs_that_would_end_the_process_are_refused(open_vocabulary, monkeypatch, pre):
    types = [TokenType.NORMAL] * 256
    fields = {"tokenizer_pre": pre, "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), types, **fields)
    monkeypatch.setattr(llama, "n_ctx", lambda: LARGE)
    for text in (b"a" * 12_000, b"!" * 12_000, b" " * 12_000, b"some words " * 30_000):
        check_text(llama, text)
        assert len(llama.tokenize(text, add_bos=False)) > 1000
    for text in (b"a" * 12_001, b"words " + b"!" * 12_001, b" " * 30_000):
        with pytest.raises(TextTooLongError, match="cannot split longer ones"):
            check_text(llama, text)


MIXED = {
    ".-": ("gpt-4o", "deepseek-llm", "falcon", "tekken", "default"),
    "/\n": ("gpt-4o",),
    "a\u0301": ("deepseek-v3", "youtu"),
    "a ": ("exaone-moe",),
    "१∑": ("deepseek-coder",),
    "カ・": ("deepseek-v3", "afmoe"),
    "。々": ("youtu",),
    "1a-": ("bloom", "gpt3-finnish", "poro-chat", "viking", "whitespace"),
}
"""Characters that an expression of llama.cpp matches in one piece, by turns."""


@pytest.mark.parametrize(
    ("pre", "characters"), [(pre, found) for found, values in MIXED.items() for pre in values]
)
def test_characters_by_turns_do_not_hide_a_run(open_vocabulary, pre, characters):
    fields = {"tokenizer_pre": pre, "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    llama.n_ctx = lambda: LARGE
    n = 12_000 // len(characters)
    check_text(llama, text := (characters * n).encode())
    assert llama.tokenize(text, add_bos=False)
    with pytest.raises(TextTooLongError, match="cannot split longer ones"):
        check_text(llama, (characters * 25_000).encode())


def test_words_and_punctuation_are_no_runs(open_vocabulary):
    fields = {"tokenizer_pre": "gpt-4o", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    llama.n_ctx = lambda: LARGE
    for text in (
        "It is 5 o'clock, isn't it? ",
        "我们去吃饭。",
        "for (i = 0; i < 9; i++) {\n",
        "é 😀 ",
        "=" * 78 + "\n",
        "| ---- | ---- |\n",
        "abc;",
        "/path/to-1",
    ):
        long = text * (20_000 // len(text))  # a run would end before
        check_text(llama, long.encode())
        assert llama.tokenize(long.encode(), add_bos=False)


def test_breaks_count_with_the_marks_before_them(open_vocabulary):
    fields = {"tokenizer_pre": "gpt-4o", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    llama.n_ctx = lambda: LARGE
    check_text(llama, b"!" * 9001 + b"\n" * 2999)
    with pytest.raises(TextTooLongError, match="12001 characters in a row"):
        check_text(llama, b"!" * 9001 + b"\n" * 3000)


def test_spaces_that_would_end_the_process_are_refused(open_vocabulary):
    fields = {"tokenizer_pre": "whitespace", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    for text in (b"two words", b"two\n\nlines", b" a"):
        check_text(llama, text)
        assert llama.tokenize(text, add_bos=False)
    for text in (b"two  spaces", b"line\n indented", "a \u3000b".encode()):
        with pytest.raises(TextTooLongError, match="Send single spaces"):
            check_text(llama, text)


def test_numbers_that_would_take_too_long_are_refused(open_vocabulary):
    fields = {"tokenizer_pre": "superbpe", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    for text in (b"1" * 2000, b"1234567890 " * 2000):
        check_text(llama, text)
        assert llama.tokenize(text, add_bos=False)
    for text in (b"1" * 2100, (b"1" * 500 + b" ") * 20):
        with pytest.raises(TextTooLongError, match="long numbers"):
            check_text(llama, text)


@pytest.mark.parametrize(
    ("stack", "most"), [(8 << 20, 12_000), (64 << 20, 12_000), (2 << 20, 3000), (-1, 3000)]
)
def test_runs_are_shorter_where_stacks_are(open_vocabulary, monkeypatch, stack, most):
    monkeypatch.setattr("resource.getrlimit", lambda _: (stack, -1))
    text_limit._most_matched.cache_clear()
    fields = {"tokenizer_pre": "gpt-4o", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), [TokenType.NORMAL] * 256, **fields)
    llama.n_ctx = lambda: LARGE
    try:
        check_text(llama, b"a" * most)
        with pytest.raises(TextTooLongError, match=f"the limit with this model is {most}"):
            check_text(llama, b"a" * (most + 1))
    finally:
        text_limit._most_matched.cache_clear()


def test_runs_are_not_limited_where_llama_cpp_splits_by_itself(open_vocabulary, monkeypatch):
    types = [TokenType.NORMAL] * 256
    fields = {"tokenizer_pre": "llama-bpe", "token_merges": ["a b"]}
    llama = open_vocabulary("gpt2", byte_tokens(), types, **fields)
    monkeypatch.setattr(llama, "n_ctx", lambda: LARGE)
    check_text(llama, b"a" * 100_000)
    assert len(llama.tokenize(b"a" * 100_000, add_bos=False)) == 100_000


def test_texts_that_many_tokens_are_searched_in_are_refused(open_vocabulary, monkeypatch):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "u", "▁"]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * 2 + [TokenType.USER_DEFINED] * 6000
    tokens += [f"<unused{i}>" for i in range(6000)]
    llama = open_vocabulary("llama", tokens, types, token_scores=[0.0] * len(tokens))
    monkeypatch.setattr(llama, "n_ctx", lambda: LARGE)
    check_text(llama, b"u" * 300_000)
    check_text(llama, b"<u" * 12_000)
    with pytest.raises(TextTooLongError, match="begin one of the model's special tokens in"):
        check_text(llama, b"<u" * 100_000)
