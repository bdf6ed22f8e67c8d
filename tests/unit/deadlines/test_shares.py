"""Choice of a prompt share beside levels: rules, bookkeeping, and properties of every plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_hooks import Levels, LevelTimes, Limit, Promise, RequestCost, ShorterPrompt
from llmaas_plugins.deadlines.correction import Fit
from llmaas_plugins.deadlines.phases import Question, answer_options, prompt_options
from llmaas_plugins.deadlines.planner import begun, plan, resumed_phase, worth_of
from llmaas_plugins.deadlines.policies import WHOLE, Policy
from llmaas_plugins.deadlines.worth import Worth

SURE = Fit(0.0, 1.0, 1.0)
N = 100
TENTHS, SHARES = (1.0, 0.8, 0.6, 0.4), (0.7, 0.5, 0.3)
LEVELS = (
    tuple(  # 1 ms for each token of a prompt; 5 ms and 50 µs for each of them for a further one
        LevelTimes(
            level, lambda n, x=level: x * n / 1000, lambda n, x=level: x * (5 + n / 20) / 1000
        )
        for level in TENTHS
    )
)
SHORTER = tuple(ShorterPrompt(share, round(N * share), 0.002) for share in SHARES)
COST = RequestCost(levels=LEVELS, shorter=SHORTER)


def question(ttft=None, tpot=None, *, cost=COST, **others):
    promise = Promise(*(None if one is None else Limit.of(one) for one in (ttft, tpot)))
    return Question(promise, cost, N, **{"ttft": SURE, "tpot": SURE} | others)


def setting(found):
    return found.levels.prompt_share, found.levels.prefill, found.levels.decode


def table(values):
    """Return a table of probabilities by share, prefill and decode level, whole prompts first."""
    whole, shorter = values[:1], values[1:]
    return Worth(TENTHS, np.empty(0), whole, SHARES, TENTHS, shorter[None])


def worth(shares):
    """Return a table in which a level is worth as much as the product of both, times the share."""
    levels = np.array(TENTHS)
    return table(np.array(shares)[:, None, None] * np.minimum.outer(levels, levels))


@pytest.mark.parametrize(
    ("ttft", "expected"),
    [
        ("100 ms", (1.0, 1.0)),
        ("40 ms", (1.0, 0.4)),  # the narrowest level keeps the promise for the whole prompt
        ("39 ms", (0.7, 0.4)),  # 2 ms to choose 70 tokens, and 0.4 ms for each of them
        ("25 ms", (0.5, 0.4)),
        ("15 ms", (0.3, 0.4)),
        ("26 %", (0.5, 0.4)),  # a share of the whole prompt's time
    ],
)
def test_without_a_table_a_shorter_prompt_is_for_promises_that_no_level_keeps(ttft, expected):
    found = plan(question(ttft))
    assert setting(found) == (*expected, None)
    assert found.ttft.is_feasible


def test_a_shorter_prompt_gets_the_widest_levels_that_fit():
    levels = tuple(LevelTimes(x, lambda n: n / 1000, LEVELS[0].tpot_s) for x in TENTHS)
    slow = RequestCost(levels=levels, shorter=SHORTER)
    assert setting(plan(question("75 ms", cost=slow))) == (0.7, 1.0, None)


def test_an_answer_s_promise_may_need_a_shorter_prompt_too():
    assert setting(plan(question(None, "4 ms"))) == (1.0, None, 0.4)
    found = plan(question(None, "3.5 ms"))  # 0.4 × (5 + 70 / 20) ms
    assert setting(found) == (0.7, None, 0.4)
    assert found.tpot.expected_s == pytest.approx(0.0034)
    assert found.tpot.is_feasible


def test_if_nothing_fits_the_nearest_setting_is_used_and_flagged():
    found = plan(question("10 ms", "1 ms"))
    assert setting(found) == (0.3, 0.4, 0.4)
    assert [phase.is_feasible for phase in found.phases] == [False, False]
    dear = tuple(one._replace(seconds=0.05) for one in SHORTER)
    found = plan(question("10 ms", cost=COST._replace(shorter=dear)))
    assert setting(found) == (1.0, 0.4, None)


def test_a_shorter_prompt_has_no_warm_prefix():
    warm = COST._replace(n_ready=60, ready_s=0.001)
    found = plan(question("17 ms", cost=warm))
    assert setting(found) == (1.0, 0.4, None)
    assert found.ttft.expected_s == pytest.approx(0.017)
    assert setting(plan(question("16 ms", cost=warm))) == (0.3, 0.4, None)


def test_the_app_s_own_share_is_kept_and_judged():
    def asked(share, ttft="100 ms", cost=COST):
        return plan(question(ttft, asked=Levels(prompt_share=share), cost=cost))

    assert setting(asked(0.5)) == (0.5, 1.0, None)
    assert asked(0.5).ttft.expected_s == pytest.approx(0.052)
    whole = asked(1.0, "30 ms")
    assert setting(whole) == (1.0, 0.4, None)
    assert not whole.ttft.is_feasible
    assert setting(asked(0.45)) == (0.5, 1.0, None)
    stays_whole = asked(0.5, cost=RequestCost(levels=LEVELS))
    assert setting(stays_whole) == (None, 1.0, None)


def test_a_prompt_without_a_choice_is_left_alone():
    assert plan(question("30 ms", cost=RequestCost(levels=LEVELS))).reading is None
    assert plan(question("30 ms", cost=RequestCost(shorter=SHORTER))).levels == Levels()


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1, 0.99, 0.5, 0.1), (0.7, 0.8, 1.0)),  # 58 ms
        ((1, 0.99, 0.98, 0.1), (0.5, 1.0, 1.0)),  # 52 ms
        ((1, 0.5, 0.5, 0.5), (1.0, 0.6, 1.0)),
        ((1, 0.6, 0.6, 0.6), (1.0, 0.6, 1.0)),  # equal worth: the longest prompt
    ],
)
def test_with_a_table_the_setting_of_the_largest_worth_is_used(shares, expected):
    asked = question("60 ms", "10 ms", worth=worth(shares))
    found = plan(asked)
    assert setting(found) == expected
    assert worth_of(asked, found) >= 0.6  # that of the whole prompt


def test_shares_that_were_not_measured_are_for_promises_that_no_level_keeps():
    known = worth((1, 1, 1, 1))
    known = known._replace(shares=(), measured=(), shorter=np.empty((1, 0, 0, 0)))
    assert setting(plan(question("60 ms", worth=known))) == (1.0, 0.6, None)
    found = plan(asked := question("30 ms", worth=known))
    assert setting(found) == (0.7, 0.4, None)
    assert worth_of(asked, found) is None


def test_a_share_between_those_that_were_measured_counts_as_the_next_shorter_one():
    known = worth((1, 0.9, 0.8, 0.7))
    assert known.at(1.0, 1.0, N, 0.69) == pytest.approx(0.8)
    assert known.at(1.0, 1.0, N, 0.7) == pytest.approx(0.9)
    assert known.at(1.0, 1.0, N, 0.29) is None
    coarse = known._replace(measured=(1.0, 0.4), shorter=known.shorter[:, :, ::3, ::3])
    assert coarse.at(0.8, 1.0, N, 0.7) == pytest.approx(0.9 * 0.4)
    assert coarse.at(0.8, 1.0, N) == pytest.approx(0.8)


def test_with_a_limit_of_the_risk_prompts_stay_whole():
    narrow = Policy(0.4, (), (0.4,), (0.9,), (1.0,), 0.05)
    asked = question("39 ms", policies=(WHOLE, narrow), worth=worth((1, 1, 1, 1)))
    found = plan(asked)
    assert (setting(found), found.policy) == ((1.0, 0.4, None), None)
    assert not found.ttft.is_feasible
    found = plan(question("40 ms", policies=(WHOLE, narrow)))
    assert (setting(found), found.policy) == ((1.0, 0.4, 0.4), narrow)
    own = plan(question("99 ms", policies=(WHOLE, narrow), asked=Levels(prompt_share=0.5)))
    assert (setting(own), own.policy) == ((0.5, 1.0, None), None)


def test_a_prompt_that_was_not_shortened_takes_the_whole_one_s_time():
    asked = question("39 ms", "3.5 ms")
    found = plan(asked)
    assert setting(found) == (0.7, 0.4, 0.4)
    whole = begun(asked, found, found.levels, N)
    assert setting(whole) == (1.0, 0.4, 0.4)
    assert whole.ttft.table_s == pytest.approx(0.04)
    assert whole.tpot.table_s == pytest.approx(0.004)
    assert not any(phase.is_feasible for phase in whole.phases)


def test_times_are_those_of_the_tokens_that_are_read():
    asked = question("39 ms", "4 ms")
    found = plan(asked)
    assert begun(asked, found, found.levels, 70) == found
    less = begun(asked, found, found.levels, 67)  # the last word did not fit
    assert (less.reading.share, less.reading.n_tokens) == (0.7, 67)
    assert less.ttft.table_s == pytest.approx(0.0288)
    other = begun(asked, found, Levels(0.4, 0.6, prompt_share=0.3), 30)  # another plugin's choice
    assert (other.reading.share, other.tpot) == (0.3, None)
    assert other.ttft.table_s == pytest.approx(0.014)


def test_a_prompt_that_is_shortened_without_a_plan_takes_its_own_time():
    asked = question("100 ms", cost=RequestCost(levels=LEVELS))
    found = begun(asked, plan(asked), Levels(1.0), 25)
    assert found.reading.share == 0.25
    assert found.ttft.table_s == pytest.approx(0.025)
    unknown = question("100 ms", cost=RequestCost())
    found = begun(unknown, plan(unknown), Levels(), 25)
    assert found.is_empty
    assert found.reading.n_tokens == 25


def test_a_shorter_prompt_ends_a_certificate():
    asked = question("1 s", policies=(WHOLE,))
    found = plan(asked)
    assert found.policy is WHOLE
    assert begun(asked, found, found.levels, N).policy is WHOLE
    assert begun(asked, found, found.levels, 50).policy is None


def test_an_answer_that_goes_on_has_the_times_of_what_was_read():
    asked = question("15 ms", "3 ms", asked=Levels(prompt_share=0.3))
    asked = asked._replace(promise=replace(asked.promise, n_most=11))
    found = plan(asked)
    assert setting(found) == (0.3, 0.4, 0.4)
    resumed = resumed_phase(asked, found, 5, 0.0104)
    assert resumed.table_s == pytest.approx(0.0026)


# -- properties ----------------------------------------------------------------------------------

LIMITS = st.one_of(st.none(), st.floats(1e-3, 0.15))


@st.composite
def questions(draw):
    """Draw a question about a prompt of which shorter ones may be read."""
    ttft_s, tpot_s = draw(LIMITS), draw(st.one_of(st.none(), st.floats(1e-3, 0.012)))
    limits = (None if one is None else Limit(one) for one in (ttft_s, tpot_s))
    promise = Promise(*limits, waited_s=draw(st.sampled_from([0.0, 0.01])))
    shorter = tuple(
        ShorterPrompt(share, round(N * share), draw(st.floats(0, 0.02)))
        for share in draw(st.lists(st.sampled_from(SHARES), unique=True))
    )
    shorter = tuple(sorted(shorter, reverse=True))
    n_ready = draw(st.integers(0, N))
    fit = Fit(0.001, draw(st.floats(0.5, 2.0)), draw(st.floats(1.0, 1.3)))
    known = None
    if draw(st.booleans()):
        values = np.random.default_rng(draw(st.integers(0, 99))).random((4, 4, 4))
        for axis in range(3):
            values = np.minimum.accumulate(values, axis=axis)
        known = table(values)
    cost = RequestCost(n_ready, 0.001, LEVELS, None, shorter)
    return Question(promise, cost, N, ttft=fit, tpot=fit, worth=known)


def _settings(asked):
    """Yield every setting with its worth, and whether it keeps the promise."""
    for reading in asked.readings:
        ttft, tpot = prompt_options(asked, reading), answer_options(asked, reading)
        for prefill in TENTHS if asked.promise.ttft else (1.0,):
            for decode in TENTHS if asked.promise.tpot else (1.0,):
                keeps = ttft.fits(prefill) and tpot.fits(decode)
                value = asked.worth and asked.worth.at(prefill, decode, N, reading.share)
                yield value, keeps


@given(questions())
def test_a_plan_keeps_the_promise_if_any_setting_does(asked):
    assert plan(asked).keeps(asked.promise) == any(keeps for _, keeps in _settings(asked))


@given(questions())
def test_no_setting_that_keeps_the_promise_is_worth_more(asked):
    found = plan(asked)
    if asked.worth is not None and found.keeps(asked.promise):
        assert worth_of(asked, found) == max(worth for worth, keeps in _settings(asked) if keeps)


@given(questions(), st.floats(0, 0.95))
def test_a_plan_is_worth_as_much_as_one_of_the_whole_prompt_at_least(asked, pressure):
    asked = asked._replace(promise=replace(asked.promise, pressure=pressure))
    found, whole = plan(asked), plan(asked._replace(asked=Levels(prompt_share=1.0)))
    if whole.keeps(asked.promise):
        assert found.keeps(asked.promise)
        if asked.worth is None:
            assert found == whole
        else:
            assert worth_of(asked, found) >= worth_of(asked, whole)
    else:
        assert found.keeps(asked.promise) or found.excess(asked.promise) <= whole.excess(
            asked.promise
        )
