"""Promises of latency, and the predictions that plugins give for a request."""

from __future__ import annotations

import math

import pytest
from hooked import manager, request

from llmaas_hooks import (
    NO_PROMISE,
    ConfigError,
    Levels,
    LevelTimes,
    Limit,
    PluginError,
    Promise,
    RequestCost,
    ShorterPrompt,
    hookimpl,
    request_scope,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("300 ms", Limit(0.3)),
        ("1.5s", Limit(1.5)),
        ("86400 s", Limit(86400.0)),
        ("123456.5 ms", Limit(123.4565)),
        ("33.5 %", Limit(0.335, is_share=True)),
        (" 60 % ", Limit(0.6, is_share=True)),
        (Limit(0.5), Limit(0.5)),
    ],
)
def test_limits_are_times_or_shares(text, expected):
    found = Limit.of(text)
    assert found.is_share == expected.is_share
    assert found.value == pytest.approx(expected.value)
    assert Limit.of(str(found)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "300", "0 ms", "-1 s", "1e3 ms", "nan s", "100000 s", "2000 %", "\uff13 s"),
        *(0.3, True, None, [], b"1 s"),
    ],
)
def test_other_limits_are_refused_with_an_example(wrong):
    with pytest.raises(ConfigError, match="expected a time such as '300 ms'"):
        Limit.of(wrong)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError) as caught:
        Limit.of("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_shares_are_of_the_whole_models_time():
    assert Limit(0.6, is_share=True).seconds(2.0) == 1.2
    assert Limit(0.3).seconds(2.0) == 0.3


def test_inner_blocks_replace_each_limit_apart():
    outer, inner = Promise(Limit(1.0), Limit(0.1)), Promise(tpot=Limit(0.2))
    with request_scope.promising(outer), request_scope.promising(inner):
        assert request_scope.current().promise == Promise(Limit(1.0), Limit(0.2))
    assert request_scope.current().promise is NO_PROMISE


def test_waiting_adds_up_and_promises_nothing():
    waited = Promise(waited_s=0.25)
    with request_scope.promising(waited), request_scope.promising(waited):
        assert request_scope.current().promise.waited_s == 0.5
        assert not request_scope.current().promise
    assert Promise(tpot=Limit(1.0))


def test_notes_are_those_of_the_inner_block():
    assert request_scope.current().notes is None
    with request_scope.noting() as outer, request_scope.noting() as inner:
        request_scope.current().notes["a"] = 1
    assert (outer, inner) == ({}, {"a": 1})


class Answering:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def llmaas_cost(self, request):
        return self.answer


LEVELS = (LevelTimes(1.0, lambda n: 0.1 * n, lambda n: 0.1),)


def test_hook_llmaas_cost_adds_up_the_answers_of_all_plugins():
    hooks = manager(
        cells=Answering(RequestCost(2, 0.25)),
        nothing=Answering(None),
        levels=Answering(RequestCost(1, 0.5, LEVELS, "id")),
    )
    assert hooks.cost(request()) == RequestCost(2, 0.75, LEVELS, "id")
    assert hooks.cost(request(), reuses=False, shortens=False) == RequestCost(0, 0.0, LEVELS, "id")


def test_cells_that_the_engine_holds_are_ready():
    one = request()
    one.engine.tokens = one.tokens[:2].tolist()
    assert manager().cost(one).n_ready == 2
    one.engine.resident_app = "mail"  # not the request's
    assert manager().cost(one).n_ready == 0


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        RequestCost(-1),
        RequestCost(4),
        RequestCost(1, -1.0),
        RequestCost(1, math.inf),
        RequestCost(1, math.nan),
        RequestCost(2.5),
        RequestCost(1, None),
        RequestCost(levels=5),
        RequestCost(levels=(1.0,)),
        RequestCost(levels=(LevelTimes(7, abs, abs),)),
    ],
)
def test_impossible_predictions_are_the_plugins_error(wrong):
    with pytest.raises(PluginError, match=r"'liar' failed in llmaas_cost: "):
        manager(liar=Answering(wrong)).cost(request())
    assert manager("log", liar=Answering(wrong)).cost(request()) == RequestCost()


def test_what_a_request_takes_is_asked_once_for_all_planners():
    asked = []

    class Planner:
        @hookimpl
        def llmaas_level(self, cost):
            return Levels(cost().ready_s)

    class Costly:
        @hookimpl
        def llmaas_cost(self):
            asked.append(1)
            return RequestCost(0, 0.5 * len(asked))

    hooks = manager(one=Planner(), other=Planner(), costly=Costly())
    assert hooks.level(request()) == Levels(0.5)
    assert asked == [1]
    assert hooks.level(request()) == Levels(1.0)  # another request


def test_a_planner_asks_only_if_it_wants_to():
    asked = []

    class Planner:
        @hookimpl
        def llmaas_level(self, request, cost):
            return Levels(cost().ready_s) if request.promise != NO_PROMISE else None

    class Costly:
        @hookimpl
        def llmaas_cost(self):
            asked.append(1)
            return RequestCost(0, 0.5)

    hooks = manager(planner=Planner(), costly=Costly())
    assert hooks.level(request()) is None
    assert not asked
    assert hooks.level(request(promise=Promise(Limit(1.0)))) == Levels(0.5)
    assert asked == [1]


class Asking:
    """Planner that asks what a request costs, and then defers a job that fails."""

    @hookimpl
    def llmaas_level(self, request, cost):
        cost()
        request.engine.defer(self.hooks.guarded(self.fail))

    def fail(self):
        raise ZeroDivisionError


class Failing:
    @hookimpl
    def llmaas_cost(self):
        raise OSError("torn")


def test_an_error_of_a_plugin_that_was_asked_is_its_own(caplog):
    asking = Asking()
    asking.hooks = manager(asking=asking, bad=Failing())
    with pytest.raises(PluginError) as caught:
        asking.hooks.level(request())
    assert (caught.value.plugin, caught.value.hook) == ("bad", "llmaas_cost")
    assert list(asking.hooks.errors()) == ["bad"]


def test_a_planners_jobs_stay_its_own_after_it_has_asked():
    asking = Asking()
    asking.hooks = manager("log", asking=asking, costly=Answering(RequestCost()))
    assert asking.hooks.level(request()) is None
    assert list(asking.hooks.errors()["asking"]) == ["llmaas_level (deferred)"]


def test_a_request_that_reuses_no_cells_has_none_ready_and_reads_its_whole_prompt():
    one = request()
    one.engine.tokens = one.tokens[:2].tolist()
    shorter = (ShorterPrompt(0.5, 1, 0.1),)
    hooks = manager(cells=Answering(RequestCost(2, 0.25, LEVELS, shorter=shorter)))
    assert hooks.cost(one).shorter == shorter
    assert hooks.cost(one, reuses=False, shortens=False) == RequestCost(levels=LEVELS)


@pytest.mark.parametrize(
    ("n_generated", "n_most", "expected"), [(3, 10, 7), (12, 10, 0), (0, None, 16), (0, 900, 64)]
)
def test_tokens_to_plan_with(n_generated, n_most, expected):
    asked = Promise(n_most=n_most)
    assert asked.n_ahead(n_generated) == expected
    assert asked.over(Promise(n_most=5)) == (Promise(n_most=5) if n_most is None else asked)
