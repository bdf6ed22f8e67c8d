"""Word pieces, each of which belongs to a word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoders import VOCABULARY

from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts.encoder import word_pieces
from llmaas_plugins.short_prompts.encoder.word_pieces import WordPieces


@pytest.fixture
def pieces():
    return WordPieces(VOCABULARY)


def names(pieces, *words):
    found = pieces.of(words)
    return [
        [VOCABULARY[i] for i in found.ids[a:b]]
        for a, b in zip(found.starts, found.starts[1:], strict=False)
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train", ["train"]),
        (" Trains", ["train", "##s"]),
        ("\n TRAINING.", ["train", "##ing", "."]),
        ("platform", ["platform"]),  # the longest piece wins
        ("caf\u00e9", ["cafe"]),
        ("99", ["9", "##9"]),
        ("bus-bus", ["bus", "-", "bus"]),
        ("bus's", ["bus", "'", "[UNK]"]),
        ("trainq", ["[UNK]"]),
        ("\u6f22\u5b57", ["\u6f22", "\u5b57"]),
        ("bu\x00s the", ["bus", "the"]),
        ("bu\u200bs", ["bus"]),  # control characters vanish
        ("the\u00a0bus", ["the", "bus"]),
        ("", []),
        (" \n\t", []),
        ("[CLS]", ["[UNK]", "[UNK]", "[UNK]"]),  # never a special piece
        ("a" * 101, ["[UNK]"]),
    ],
)
def test_a_word_is_divided_as_berts_are(pieces, word, expected):
    assert names(pieces, word) == [expected]
    assert names(pieces, word) == [expected]  # now from memory


def test_pieces_belong_to_their_words(pieces):
    assert names(pieces, "the", " buss", " ", "!") == [["the"], ["bus", "##s"], [], ["!"]]
    none = pieces.of([])
    assert none.ids.tolist() == []
    assert none.starts.tolist() == [0]
    assert none.ids.dtype == np.int32


@given(st.text(st.characters(max_codepoint=127), max_size=12))
def test_ascii_is_divided_as_unicode_is(text):
    found = list(word_pieces._runs(text))
    assert found == list(word_pieces._unicode_runs(text.lower()))


def test_few_short_words_are_remembered(pieces, monkeypatch):
    monkeypatch.setattr(word_pieces, "_MOST_KNOWN", 3)
    for word in ("a", "b", "c", "bus", "a" * 99):
        pieces.of([word])
        assert len(pieces._known) <= 3
    assert set(pieces._known) == {"bus"}


def test_a_vocabulary_without_special_pieces_is_refused():
    with pytest.raises(ConfigError, match=r"has no piece '\[SEP\]'"):
        WordPieces(["[CLS]", "[UNK]", "a"])
