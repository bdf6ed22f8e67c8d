"""Choice of levels for a promise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_hooks import Levels, LevelTimes, Limit, Promise, RequestCost
from llmaas_plugins.deadlines.correction import Fit
from llmaas_plugins.deadlines.phases import Question
from llmaas_plugins.deadlines.planner import Plan, answer_phase, plan, resumed_phase

SURE = Fit(0.0, 1.0, 1.0)
TENTHS = (1.0, 0.8, 0.6, 0.4)


def times(level):
    """Return times of a level: 1 ms for each prompt token, 10 ms for each further one."""
    return LevelTimes(level, lambda n: level * n / 1000, lambda _n: level / 100)


LEVELS = tuple(map(times, TENTHS))


def question(promise, *, cost=RequestCost(levels=LEVELS), n_prompt=100, **others):  # noqa: B008
    return Question(promise, cost, n_prompt, **{"ttft": SURE, "tpot": SURE} | others)


def limits(ttft=None, tpot=None):
    return Promise(*(None if one is None else Limit.of(one) for one in (ttft, tpot)))


@pytest.mark.parametrize(
    ("promise", "expected"),
    [
        (limits("100 ms", "10 ms"), Levels(1.0, 1.0)),
        (limits("99 ms", "7 ms"), Levels(0.8, 0.6)),
        (limits("60 %", "80 %"), Levels(0.6, 0.8)),
        (limits(tpot="5 ms"), Levels(None, 0.4)),
        (limits(ttft="1 s"), Levels(1.0, None)),
    ],
)
def test_the_widest_levels_that_fit_are_used(promise, expected):
    found = plan(question(promise))
    assert found.levels == expected
    assert all(phase.is_feasible for phase in found.phases if phase is not None)


def test_if_nothing_fits_the_fastest_level_is_used_and_flagged():
    found = plan(question(limits("30 ms", "1 ms")))
    assert found.levels == Levels(0.4, 0.4)
    assert [phase.is_feasible for phase in found.phases] == [False, False]
    assert found.ttft.limit_s == 0.03
    assert found.ttft.expected_s == pytest.approx(0.04)


def test_the_fastest_level_need_not_be_the_narrowest():
    slow = LevelTimes(0.3, lambda n: n / 100, lambda _n: 1.0)
    found = plan(question(limits("1 ms", "1 ms"), cost=RequestCost(levels=(*LEVELS, slow))))
    assert found.levels == Levels(0.4, 0.4)


def test_tokens_that_are_ready_take_no_time_but_restoring_them_does():
    warm = RequestCost(n_ready=80, ready_s=0.004, levels=LEVELS)
    assert plan(question(limits("24 ms"), cost=warm)).ttft.level == 1.0
    assert plan(question(limits("20 ms"), cost=warm)).ttft.level == 0.8
    # a share is of the whole model's time for the whole prompt
    assert plan(question(limits("24 %"), cost=warm)).ttft.level == 1.0


def test_time_that_a_request_waited_counts():
    promise = Promise(Limit(0.1), waited_s=0.03)
    found = plan(question(promise, ttft=Fit(0.0, 1.1, 1.0))).ttft
    assert found.level == 0.6
    assert found.table_s == pytest.approx(0.06)
    assert found.expected_s == pytest.approx(0.096)
    late = plan(question(Promise(Limit(0.1), waited_s=0.2))).ttft
    assert (late.level, late.is_feasible) == (0.4, False)


def test_one_token_is_evaluated_even_if_all_are_ready():
    found = plan(question(limits("1 s"), cost=RequestCost(100, 0.0, LEVELS)))
    assert found.ttft.table_s == 0.001


def test_levels_that_the_app_sets_are_kept_and_judged():
    found = plan(question(limits("70 ms", "5 ms"), asked=Levels(0.9, 0.65)))
    assert found.levels == Levels(0.8, 0.6)
    assert [phase.is_feasible for phase in found.phases] == [False, False]
    assert plan(question(limits("1 s"), asked=Levels(0.1 + 0.2))).ttft.level == 0.4


def test_slow_machines_use_narrower_levels():
    found = plan(question(limits("100 ms"), ttft=Fit(0.0, 1.5, 1.06)))
    assert found.ttft.level == 0.6
    assert found.ttft.expected_s == pytest.approx(0.09)


@pytest.mark.parametrize("fit", [Fit(), Fit(0.0, 2.0, 1.5), Fit(0.0, 0.3, 2.0)])
def test_shares_do_not_depend_on_the_machine_as_the_whole_model_is_slower_too(fit):
    for share, level in (("100 %", 1.0), ("80 %", 0.8), ("79 %", 0.6)):
        found = plan(question(limits(share, share), ttft=fit, tpot=fit))
        assert found.levels == Levels(level, level)
        assert all(phase.is_feasible for phase in found.phases)
        assert found.ttft.limit_s > found.ttft.expected_s


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_times_that_make_no_sense_are_left_out(wrong):
    odd = LevelTimes(0.9, lambda _n: wrong, lambda _n: wrong)
    some = plan(question(limits("90 ms", "80 %"), cost=RequestCost(levels=(*LEVELS, odd))))
    assert some.levels == Levels(0.8, 0.8)
    assert plan(question(limits("1 s", "60 %"), cost=RequestCost(levels=(odd,)))) == Plan(
        None, None
    )


def test_phases_that_another_plugin_decides_are_given_up():
    found = plan(question(limits("99 ms", "7 ms")))
    assert found.at(Levels(0.8, 0.6)) == found
    assert found.at(Levels(0.8, 0.4)) == Plan(found.ttft, None)
    assert found.at(Levels()) == Plan(None, None)


def test_without_times_nothing_is_planned():
    found = plan(question(limits("1 s", "1 s"), cost=RequestCost()))
    assert found == Plan(None, None)
    assert found.levels == Levels()


@given(
    st.floats(1e-4, 1.0),
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.floats(0.2, 3.0),
    st.floats(1.0, 2.0),
)
def test_a_feasible_plan_fits_and_no_wider_one_does(limit_s, n_prompt, n_ready, middle, spread):
    fit = Fit(0.002, middle, spread)
    cost = RequestCost(min(n_ready, n_prompt), 0.001, LEVELS)
    promise = Promise(Limit(limit_s))
    phase = plan(question(promise, cost=cost, n_prompt=n_prompt, ttft=fit)).ttft
    n_evaluated = max(n_prompt - cost.n_ready, 1)
    fits = [
        one.level
        for one in LEVELS
        if fit.most_s(cost.ready_s + one.ttft_s(n_evaluated)) <= limit_s * (1 + 1e-9)
    ]
    assert phase.is_feasible == bool(fits)
    assert phase.level == (max(fits) if fits else min(TENTHS))


@pytest.mark.parametrize(
    ("room_s", "level"), [(None, 1.0), (0.2, 1.0), (0.085, 0.8), (0.05, 0.4), (0.01, 0.4)]
)
def test_the_prompt_s_level_leaves_room_for_those_behind(room_s, level):
    found = plan(question(Promise(Limit(0.1), Limit(0.01), room_s=room_s)))
    assert found.ttft.level == level
    assert found.ttft.is_feasible  # by its own limit
    assert found.tpot.level == 1.0


@pytest.mark.parametrize(
    ("pressure", "levels"),
    [(0.0, Levels(1.0, 1.0)), (0.25, Levels(0.6, 0.6)), (0.9, Levels(0.4, 0.4))],
)
def test_under_pressure_both_levels_leave_time_for_others(pressure, levels):
    found = plan(question(Promise(Limit(0.1), Limit(0.01), pressure=pressure)))
    assert found.levels == levels
    assert all(phase.is_feasible for phase in found.phases)


@pytest.mark.parametrize(
    ("planned", "passed_ms", "level", "is_feasible"),
    [
        (1.0, 40, 1.0, True),  # as planned: 4 of 10 further tokens, 10 ms each
        (1.0, 50, 0.8, True),  # 6 tokens in 50 ms
        (0.6, 40, 0.6, True),  # never wider than before
        (1.0, 76, 0.4, True),
        (1.0, 80, 0.4, False),
        (1.0, 300, 0.4, False),
    ],
)
def test_an_answer_makes_up_for_time_that_others_took(planned, passed_ms, level, is_feasible):
    promise = Promise(tpot=Limit.of("10 ms"), n_most=11)
    asked = question(promise)
    before = answer_phase(asked, planned)
    found = resumed_phase(asked, Plan(None, before), 5, passed_ms / 1000)
    assert (found.level, found.is_feasible) == (level, is_feasible)
    assert found.limit_s == 0.01
    assert found.expected_s == pytest.approx((passed_ms / 1000 + 6 * found.level / 100) / 10)


def test_a_complete_answer_and_one_without_a_promise_keep_their_levels():
    for promise in (Promise(tpot=Limit.of("10 ms"), n_most=5), Promise(n_most=11)):
        asked = question(promise)
        before = answer_phase(asked, 1.0)
        assert resumed_phase(asked, Plan(None, before), 5, 99.0) is before
