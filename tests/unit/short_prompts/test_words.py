"""A prompt's tokens, divided into words."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gguf import TokenType
from llama_cpp import Llama
from vocabularies import byte_tokens, opened_vocabulary

from llmaas_hooks import LlmaasError
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of
from llmaas_plugins.short_prompts.words import divide

TEXTS = (
    "Anna lives in Rome, near the sea.",
    "  Two blanks  before\tand between.\n\n  A paragraph.\n",
    "getName(user_id) -> https://example.org/a-b?c=1",
    "Smile 🙂, 我们去吃饭。 Größe",
    "\n",
    " ",
    "x",
)


@pytest.fixture
def words(llama, tokens_of):
    return lambda text: divide(tokens_of(text), vocabulary_of(llama))


@pytest.mark.parametrize("text", TEXTS)
def test_words_cover_the_text_without_gaps(words, tokens_of, text):
    found = words(text)
    assert found.starts[0] == 0
    assert found.starts[-1] == len(tokens_of(text))
    assert (np.diff(found.starts) > 0).all()
    assert "".join(found.texts) == f" {text}"  # SentencePiece puts a blank first


def test_blanks_belong_to_the_word_after_them(words):
    assert words("Two blanks  before\n\nit, and no-one.").texts == (
        *("", " Two", " blanks", "  before", "\n\nit,", " and", " no-one."),
    )


def test_blanks_at_the_end_are_a_word(words):
    assert words("the end \n").texts[-2:] == (" end", " \n")


def test_a_character_of_several_tokens_is_not_divided(words):
    assert words("a 🙂🙃 b").texts == ("", " a", " 🙂🙃", " b")


def test_scripts_without_blanks_have_a_word_at_each_token(words):
    assert words("我们 go我").texts == ("", " 我", "们", " go", "我")


def test_marks_are_words_without_a_text(words):
    found = words("a</s>b<s>")
    assert found.texts == ("", " a", "", " b", "")
    assert found.is_markup.tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("piece", ["ab", "🙂", "我"])
def test_long_words_are_divided_between_characters(words, piece):
    found = words(piece * 200)
    sizes = np.diff(found.starts)
    assert sizes.max() <= 32
    assert "�" not in "".join(found.texts)


@pytest.mark.parametrize("token", [-1, 4096])
def test_other_numbers_than_tokens_are_refused(llama, token):
    with pytest.raises(ValueError, match=r"tokens must be from 0 to 4095, found .* to "):
        divide(np.array([1, token, 5], np.int32), vocabulary_of(llama))


def test_no_tokens_are_no_words(llama):
    found = divide(np.zeros(0, np.int32), vocabulary_of(llama))
    assert found.texts == ()
    assert found.starts.tolist() == [0]


def test_broken_characters_become_replacement_characters(llama):
    vocabulary = vocabulary_of(llama)
    smile = np.array(llama.tokenize("a 🙂 b".encode()), np.int32)
    found = divide(np.delete(smile, -3), vocabulary)  # the last byte of the character
    assert found.texts == ("", " a", " �", " b")


@contextlib.contextmanager
def opened(folder, kind, tokens, types, **fields):
    with contextlib.closing(
        opened_vocabulary(folder / "model.gguf", kind, tokens, types, **fields)
    ) as llama:
        yield vocabulary_of(llama)


def test_byte_level_bpe_tokens_span_blanks_and_lines(tmp_path):
    me_bytes = "".join(byte_tokens()[byte] for byte in "我".encode())
    more = [me_bytes, "Ġto", "ofĠthe", ".ĊĊ", "user", "<|im_start|>", "<|im_end|>", "<|user|>"]
    types = [TokenType.NORMAL] * 261 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    me, to, of_the, stop, user, start, end, plain = range(256, 264)
    blank, line = b" \n"
    a, *smile = b"a" + "🙂".encode()  # the tokens of bytes come first
    fields = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}
    with opened(tmp_path, "gpt2", [*byte_tokens(), *more], types, **fields) as vocabulary:

        def texts(*tokens):
            return divide(np.array(tokens, np.int32), vocabulary).texts

        assert texts(a, to, a, blank, blank, a) == ("a", " toa", "  a")
        assert texts(a, of_the, a) == ("aof thea",)
        assert texts(to, of_the, to) == (" toof the", " to")
        assert texts(a, me, a, to, me) == ("a", "我", "a", " to", "我")
        assert texts(a, stop, a) == ("a.\n\n", "a")
        assert texts(a, blank, *smile, to) == ("a", " 🙂", " to")
        found = divide(
            np.array([start, user, line, a, to, end, line, plain, a], np.int32), vocabulary
        )
        assert found.texts == ("", "user", "\n", "a", " to", "", "\n", "", "a")
        assert found.is_markup.tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False]
        assert found.roles == {3: "user", 7: "<|im_end|>", 8: "<|user|>"}
        found = divide(np.array([plain, user, to, a], np.int32), vocabulary)
        assert found.texts == ("", "user", " toa")
        assert found.is_markup.tolist() == [True, False, False]
        assert found.roles == {1: "<|user|>"}


def test_names_between_control_tokens_are_markup(tmp_path):
    more = ["<|start|>", "<|end|>", "user", "ĊĊ", "<|over|>"]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 2
    start, end, user, lines, over = range(256, 261)
    fields = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}
    with opened(
        tmp_path, "gpt2", [*byte_tokens(), *more], [*types, TokenType.CONTROL], **fields
    ) as vocabulary:
        prompt = np.array([start, user, end, lines, ord("a"), over], np.int32)
        found = divide(prompt, vocabulary)
    assert found.is_markup.tolist() == [True, True, True, True, False, True]
    assert found.roles == {4: "user", 6: "<|over|>"}


def test_word_piece_tokens_go_on_with_a_word(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hel", "lo", "▁the", "."]
    types = [
        TokenType.CONTROL,
        TokenType.UNKNOWN,
        *[TokenType.CONTROL] * 2,
        *[TokenType.NORMAL] * 4,
    ]
    ids = {"unk_token_id": 1, "sep_token_id": 3, "pad_token_id": 0}
    with opened(tmp_path, "bert", tokens, types, **ids) as vocabulary:
        found = divide(np.array([2, 4, 5, 7, 6, 1, 6, 3], np.int32), vocabulary)
    assert found.texts == ("", " hello.", " the", "", " the", "")
    assert found.is_markup.tolist() == [True, False, False, False, False, True]


def test_tokens_without_texts_are_words_of_their_own(tmp_path):
    """llama.cpp ends a process that asks for the text of such a token."""
    with opened(tmp_path, "no_vocab", [], [], vocab_size=8) as vocabulary:
        found = divide(np.array([1, 7, 7], np.int32), vocabulary)
    assert found.texts == ("", "", "")
    assert not found.is_markup.any()


def test_tokens_are_read_once(llama, monkeypatch):
    vocabulary = vocabulary_of(llama)
    assert vocabulary is vocabulary_of(llama)
    tokens = np.array(llama.tokenize(b"some words twice"), np.int32)
    first = divide(tokens, vocabulary)
    monkeypatch.setattr(vocabulary, "_learn", lambda _token: pytest.fail("read again"))
    assert divide(tokens, vocabulary).texts == first.texts


def test_a_vocabulary_is_that_of_the_model_that_is_loaded(tmp_path):
    """The same object, and maybe the same address, may have another model later."""
    settings = {"vocab_only": True, "verbose": False}
    paths = [tmp_path / f"{n}.gguf" for n in (8, 16)]
    for path, n in zip(paths, (8, 16), strict=True):
        opened_vocabulary(path, "no_vocab", [], [], vocab_size=n).close()
    with contextlib.closing(Llama(str(paths[0]), **settings)) as llama:
        assert vocabulary_of(llama).n_tokens == 8
        llama.close()
        with pytest.raises(LlmaasError, match="was closed"):
            vocabulary_of(llama)
        llama.__init__(str(paths[1]), **settings)
        assert vocabulary_of(llama).n_tokens == 16
