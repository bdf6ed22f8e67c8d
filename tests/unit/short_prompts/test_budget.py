"""Words that a shortened prompt keeps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmaas_plugins.short_prompts.budget import Room, budget, shorten
from llmaas_plugins.short_prompts.scorer import Prompt


def prompt_of_sizes(sizes, protected=()):
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    is_protected = np.isin(np.arange(len(sizes)), protected)
    words = tuple(f" w{at}" for at in range(len(sizes)))
    frequent = np.zeros_like(is_protected)
    tokens = np.arange(starts[-1], dtype=np.int32)
    return Prompt(tokens, starts, words, is_protected, frequent, len(sizes))


def kept(found):
    return np.flatnonzero(found.is_kept).tolist()


def scored(*scores):
    return np.array(scores, np.float32)


@pytest.mark.parametrize(
    ("n", "share", "expected"),
    [(100, 0.29, 29), (10, 0.55, 5), (7, 1.0, 7), (3, 0.1, 1), (1000, 0.057, 57), (20, 0.999, 19)],
)
def test_a_share_is_rounded_down(n, share, expected):
    assert budget(prompt_of_sizes([1] * n), share) == expected


def test_words_with_the_largest_scores_are_kept_in_order():
    found = shorten(prompt_of_sizes([2, 1, 3, 1]), scored(0.5, 0.9, 0.7, 0.1), 4)
    assert kept(found) == [1, 2]
    assert found.tokens.tolist() == [2, 3, 4, 5]
    assert found.left_out == (" w0", " w3")
    assert found.n_left_out == 3
    assert not found.exceeds


def test_earlier_words_come_first_among_equals():
    assert kept(shorten(prompt_of_sizes([1] * 5), scored(0, 1, 1, 1, 0), 2)) == [1, 2]


def test_a_word_that_does_not_fit_makes_room_for_smaller_ones():
    assert kept(shorten(prompt_of_sizes([2, 4, 1, 1]), scored(9, 8, 7, 6), 4)) == [0, 2, 3]


def test_protected_words_count_and_are_kept():
    found = shorten(prompt_of_sizes([1, 1, 1, 1], protected=[3]), scored(1, 2, 3, 0), 2)
    assert kept(found) == [2, 3]


def test_too_many_protected_words_are_flagged_and_kept_alone():
    prompt = prompt_of_sizes([3, 1, 3], protected=[0, 2])
    found = shorten(prompt, scored(1, 9, 1), 5)
    assert kept(found) == [0, 2]
    assert found.exceeds
    assert Room.of(prompt).n_read(5) == len(found.tokens) == 6


def test_a_budget_that_suffices_keeps_everything():
    prompt = prompt_of_sizes([2, 2])
    found = shorten(prompt, scored(0, 0), 4)
    assert found.is_kept.all()
    assert found.left_out == ()
    assert Room.of(prompt).n_read(9) == 4


def test_words_left_out_in_a_row_are_one_text():
    found = shorten(prompt_of_sizes([1] * 5), scored(0, 0, 9, 0, 8), 2)
    assert found.left_out == (" w0 w1", " w3")


def test_what_is_no_number_comes_last():
    scores = scored(np.nan, -np.inf, np.inf, 0)
    assert kept(shorten(prompt_of_sizes([1] * 4), scores, 2)) == [2, 3]
    assert kept(shorten(prompt_of_sizes([1] * 4), scores, 3)) == [1, 2, 3]


def test_numbers_and_names_may_go_if_they_would_take_more_than_half_of_the_budget():
    one = prompt_of_sizes([2] * 10, protected=range(5))
    frequent = dataclasses.replace(one, is_frequent=np.isin(np.arange(10), [1, 3]))
    scores = np.arange(10, dtype=np.float32)
    whole = shorten(frequent, scores, 20)
    assert whole.is_kept.all()
    assert not whole.is_crowded
    crowded = shorten(frequent, scores, 12)
    assert np.flatnonzero(crowded.is_kept).tolist() == [0, 2, 4, 7, 8, 9]
    assert crowded.is_crowded
    assert not crowded.exceeds
    assert Room.of(frequent).n_read(12) == 12
    assert Room.of(frequent).n_read(4) == 6
    assert shorten(frequent, scores, 4).exceeds
