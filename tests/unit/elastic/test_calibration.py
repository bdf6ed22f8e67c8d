"""Calibration text: packaged kinds, and windows to search and to judge on."""

from __future__ import annotations

import numpy as np

from llmaas_plugins.elastic.calibration import packaged_texts, parts_of


def windows(*starts, length=10):
    return [np.arange(start, start + length, dtype=np.int32) for start in starts]


def firsts(found):
    return [int(window[0]) for window in found]


def test_packaged_texts_are_of_six_kinds_and_plain():
    texts = packaged_texts()
    assert len(texts) == 6
    for text in texts.values():
        assert text.isascii()
        assert 300 <= len(text.split()) <= 600
    lines = [line for text in texts.values() for line in text.splitlines() if len(line) > 40]
    assert len(lines) == len(set(lines))


def test_no_window_is_both_searched_and_judged_on():
    texts = windows(0, 10, 20, 30), windows(100, 110), windows(200)
    search, judge = parts_of(texts, 1000)
    assert firsts(search) == [0, 100, 200, 20]
    assert firsts(judge) == [10, 110, 30]


def test_each_text_comes_in_turn_until_there_are_enough_tokens():
    texts = windows(0, 10, 20, 30), windows(100, 110)
    search, judge = parts_of(texts, 25)
    assert (firsts(search), firsts(judge)) == ([0, 100], [10, 110])
    search, judge = parts_of(texts, 1)
    assert (firsts(search), firsts(judge)) == ([0], [10])


def test_a_text_of_one_window_is_searched_and_judged_on():
    search, judge = parts_of([windows(5)], 100)
    assert firsts(search) == firsts(judge) == [5]
