"""Labels: words that summaries keep, and words with large weights."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.short_prompts.encoder.labels import kept_words, largest, words_of


def kept(text, summary, **options):
    words = words_of(text)
    found = kept_words(words, words_of(summary), **options)
    return [word.strip() for word, is_kept in zip(words, found, strict=True) if is_kept]


def test_words_have_their_blanks():
    assert words_of(" The  red\nbus.\n") == [" The", "  red", "\nbus."]
    assert words_of(" \n") == []


def test_words_of_the_summary_are_kept():
    assert kept("The red bus leaves at nine from here", "bus leaves nine") == [
        "bus",
        "leaves",
        "nine",
    ]


def test_a_word_that_the_text_lacks_moves_nothing():
    text = "Tom waits for the red bus and Ann walks home"
    assert kept(text, "Tom awaits a crimson bus; Ann hikes home") == ["Tom", "bus", "Ann", "home"]


def test_other_forms_signs_and_capitals_match():
    assert kept("They WALKED, talking to Tom's dogs.", "walk talks Tom dog") == [
        "WALKED,",
        "talking",
        "Tom's",
        "dogs.",
    ]


def test_each_word_of_the_summary_keeps_another_word_near_the_last_match():
    text = "a bus here " + "x " * 20 + "Ann takes a bus"
    words = words_of(text)
    found = kept_words(words, words_of("Ann bus"))
    assert [i for i, is_kept in enumerate(found) if is_kept] == [23, 26]
    found = kept_words(words, words_of("Ann bus bus"))
    assert [i for i, is_kept in enumerate(found) if is_kept] == [1, 23, 26]


def test_words_far_from_the_last_match_are_not_kept():
    assert kept("one " + "x " * 50 + "two", "one two", window=10) == ["one"]


@pytest.mark.parametrize("summary", ["", "...", "\u2014 !"])
def test_signs_keep_nothing(summary):
    assert kept("one ... two \u2014 !", summary) == []


def test_largest_values():
    values = np.array([3, 1, 2, 9], np.float32)
    assert largest(values, 0.5) == [True, False, False, True]
    assert largest(values, 0.01) == [False, False, False, True]
    assert largest(np.zeros(4, np.float32), 0.5) == [True, True, False, False]
