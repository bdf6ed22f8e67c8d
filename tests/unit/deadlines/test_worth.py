"""Probability of the whole model's answer: it rises with both levels, and is near the truth."""

from __future__ import annotations

import numpy as np
from answered import COARSE, LEVELS, N_ANSWER, SHARES, answers, with_shorter
from hypothesis import given
from hypothesis import strategies as st

from llmaas_hooks import LevelTimes, Limit, Promise, RequestCost
from llmaas_plugins.deadlines.phases import Question
from llmaas_plugins.deadlines.planner import plan
from llmaas_plugins.deadlines.worth import Margins, Worth

TIMES = tuple(
    LevelTimes(level, lambda n, x=level: x * n / 1000, lambda _n, x=level: x / 100)
    for level in LEVELS
)


def test_worth_rises_with_both_levels_and_is_near_the_truth():
    worth = Worth.of(answers(5000), N_ANSWER)
    assert (np.diff(worth.whole, axis=1) <= 1e-9).all()
    assert (np.diff(worth.whole, axis=2) <= 1e-9).all()
    assert worth.at(1.0, 1.0, 50) == 1
    # the risk of an answer is its mean over margins
    for prefill, decode, expected in ((1.0, 0.6, 0.96), (0.6, 1.0, 0.96), (0.4, 0.4, 0.88)):
        assert abs(worth.at(prefill, decode, 50) - expected) < 0.03
    assert worth.at(0.9, 1.0, 50) is None


def test_worth_rises_with_the_share_of_a_prompt_too():
    found = answers(5000)
    worth = Worth.of(with_shorter(found), N_ANSWER)
    np.testing.assert_array_equal(worth.whole, Worth.of(found, N_ANSWER).whole)
    for prefill in LEVELS:
        for decode in LEVELS:
            shares = [worth.at(prefill, decode, 50, one) for one in (1.0, *SHARES)]
            assert shares == sorted(shares, reverse=True)
    assert (np.diff(worth.shorter, axis=2) <= 1e-9).all()
    assert (np.diff(worth.shorter, axis=3) <= 1e-9).all()
    for share, kept in zip(SHARES, (0.9, 0.8), strict=True):
        for level in COARSE:
            expected = kept * worth.at(level, 1.0, 50)
            assert abs(worth.at(level, 1.0, 50, share) - expected) < 0.03


def test_no_part_of_a_prompt_is_worth_more_than_the_whole():
    found = with_shorter(answers(300))
    found.shorter.leads[:] = N_ANSWER  # by chance, or since it says less about something else
    worth = Worth.of(found, N_ANSWER)
    assert worth.at(0.6, 0.6, 50, 0.5) == worth.at(0.6, 0.6, 50) < 1


def test_prompts_of_other_lengths_have_another_worth():
    found = answers(2000)
    found.leads[found.n_prompt > 100, :, 3] = 0
    worth = Worth.of(found, N_ANSWER)
    assert worth.at(1.0, 0.4, 20) > 0.8
    assert worth.at(1.0, 0.4, 199) == 0


def test_one_request_is_enough_for_a_table():
    worth = Worth.of(answers(1), N_ANSWER)
    assert worth.whole.shape == (1, len(LEVELS), len(LEVELS))


def test_risk_falls_with_the_margin_and_rises_with_narrower_levels():
    found = Margins.of(answers(5000), 0, N_ANSWER)
    assert (np.diff(found.risks, axis=1) <= 1e-9).all()
    assert (np.diff(found.risks, axis=0) >= -1e-9).all()
    assert found.risks[2, 0] > 2 * found.risks[2, -1]


def test_equal_margins_are_one_range():
    found = answers(100)
    found.margins[:] = 1.0
    assert Margins.of(found, 0, N_ANSWER).risks.shape == (len(LEVELS), 1)


@given(st.floats(0.01, 0.2), st.floats(1e-3, 2e-2), st.integers(0, 5))
def test_the_widest_levels_that_fit_are_the_pair_with_the_highest_worth(ttft_s, tpot_s, seed):
    worth = Worth.of(answers(300, seed=seed), N_ANSWER)
    question = Question(Promise(Limit(ttft_s), Limit(tpot_s)), RequestCost(levels=TIMES), 100)
    found = plan(question)
    if not all(phase.is_feasible for phase in found.phases):
        return
    feasible = [
        (one.level, other.level)
        for one in TIMES
        for other in TIMES
        if question.ttft.most_s(one.ttft_s(100)) <= ttft_s
        and question.tpot.most_s(other.tpot_s(100)) <= tpot_s
    ]
    best = max(worth.at(*pair, 100) for pair in feasible)
    assert worth.at(found.levels.prefill, found.levels.decode, 100) == best


def test_words_that_were_chosen_otherwise_are_worth_nothing_known():
    found = Worth((1.0,), np.empty(0), np.full((1, 1, 1), 1.0), (0.5,), (1.0,),
                  np.full((1, 1, 1, 1), 0.6), "encoder")  # fmt: skip
    for chosen_by, expected in (("encoder", 0.6), (None, 0.6), ("attention", None)):
        known = found.known_of(chosen_by)
        assert known.at(1.0, 1.0, 100, 0.5) == expected
        assert known.at(1.0, 1.0, 100) == 1.0
