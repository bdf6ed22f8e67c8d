"""Scorers that know only where a word stands, and the time that others take."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.short_prompts.scorers import SCORERS
from llmaas_plugins.short_prompts.scorers.seconds import MeasuredSeconds

TEXT = "one two three four five six seven eight nine ten and then so on to the end of it all"


@pytest.fixture
def one(prompt):
    return prompt(TEXT)


@pytest.mark.parametrize(("name", "sign"), [("first", -1), ("last", 1)])
def test_words_at_one_end_are_preferred(one, name, sign):
    scorer = SCORERS[name]({})
    scores = scorer.scores(one, None)
    assert scores.shape == (len(one.words),)
    assert (sign * np.diff(scores) > 0).all()
    assert scorer.seconds(1000) == 0


def test_lots_are_the_same_for_the_same_prompt_only(one, prompt):
    random = SCORERS["random"]({})
    again, other = prompt(TEXT), prompt(f"{TEXT}!")
    assert random.scores(one, None).tolist() == random.scores(again, None).tolist()
    assert random.scores(one, None)[0] != random.scores(other, None)[0]
    assert random.seconds(1000) == 0


def test_times_are_a_line_through_what_was_measured():
    times = MeasuredSeconds()
    assert times.at(100) is None
    times.add(100, 0.2)
    assert times.at(50) == pytest.approx(0.1)
    times.add(300, 0.4)
    assert times.at(0) == pytest.approx(0.1)
    assert times.at(500) == pytest.approx(0.6)


def test_times_are_never_negative():
    times = MeasuredSeconds()
    times.add(100, 0.1)
    times.add(200, 0.5)
    assert times.at(1) == pytest.approx(0.002)
    times = MeasuredSeconds()
    times.add(100, 0.3)
    times.add(200, 0.1)
    assert times.at(1000) == pytest.approx(1000 * 0.4 / 300)
