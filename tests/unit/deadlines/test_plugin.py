"""Hooks of deadlines on a fake engine: promises, plans, outcomes and what the status says."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from llmaas_hooks import (
    ConfigError,
    HookManager,
    Levels,
    LevelTimes,
    Limit,
    Promise,
    Request,
    RequestCost,
    RequestStats,
    hookimpl,
)
from llmaas_hooks.testing import FakeEngine, check_contract, serve
from llmaas_plugins import deadlines
from llmaas_plugins.deadlines.config import DeadlinesConfig
from llmaas_plugins.deadlines.plugin import Deadlines

PROMPT = np.arange(100, dtype=np.int32)
LEVELS = tuple(
    LevelTimes(level, lambda n, x=level: x * n / 1000, lambda _n, x=level: x / 100)
    for level in (1.0, 0.8, 0.6, 0.4)
)


class Measured:
    @hookimpl
    def llmaas_cost(self):
        return RequestCost(levels=LEVELS)


class Planned:
    """Manager with the plugin, and one engine."""

    def __init__(self, config=None, *, times=True):
        self.hooks = HookManager("raise")
        self.plugin = Deadlines(DeadlinesConfig.model_validate(config or {}))
        self.hooks.register("deadlines", self.plugin)
        if times:
            self.hooks.register("elastic", Measured())
        self.engine = FakeEngine(llama=SimpleNamespace(model_path="model.gguf"))

    def serve(self, ttft_s=0.05, tpot_s=0.005, n=11, **facts):
        """Serve a request that takes this long; return the levels that were planned."""
        request = Request(self.engine, PROMPT, **{"context_id": None} | facts)
        levels = self.hooks.level(request)
        self.hooks.request_begin(request, levels)
        first = ttft_s if n else None
        all_s = ttft_s + tpot_s * max(n - 1, 0)
        stats = RequestStats(100, 0, n, 0.0, first, all_s, tpot_s * max(n - 1, 0))
        self.hooks.request_end(request, stats)
        return levels and Levels(levels.prefill, levels.decode)

    def status(self):
        return self.hooks.status()["deadlines"]


def promise(ttft=None, tpot=None):
    return Promise(*(None if one is None else Limit.of(one) for one in (ttft, tpot)))


def test_the_contract_is_kept():
    def use(hooks):
        engine = FakeEngine(ctx=id(object()), llama=SimpleNamespace(model_path="model.gguf"))
        serve(hooks, engine, [1, 2, 3])

    check_contract(Deadlines, {"ttft": "100 ms"}, use)


def test_requests_without_a_promise_are_left_alone():
    planned = Planned()
    assert planned.serve() is None
    assert planned.status()["requests"]["promised"] == 0
    assert planned.status()["corrections"] == {}


def test_a_request_goes_before_its_app_and_that_before_the_rest():
    config = {"ttft": "500 ms", "tpot": "50 ms", "apps": {"mail": {"ttft": "50 ms"}}}

    def levels(**facts):
        return Planned(config).serve(**facts)

    assert levels() == Levels(1.0, 1.0)
    assert levels(app="mail") == Levels(0.4, 1.0)
    assert levels(app="mail", promise=promise("90 ms")) == Levels(0.8, 1.0)
    assert levels(app="mail", promise=promise(tpot="5 ms")) == Levels(0.4, 0.4)
    assert levels(app="mail", declined=frozenset({"deadlines"})) is None


def test_without_elastic_the_whole_model_is_judged():
    planned = Planned()
    levels = planned.serve(promise=promise("70 ms"), declined=frozenset({"elastic"}))
    assert levels == Levels(1.0)
    assert planned.status()["requests"]["infeasible"] == 1


def test_the_status_says_promised_expected_and_measured():
    planned = Planned()
    planned.serve(0.09, 0.004, app="mail", promise=promise("70 ms", "60 %"))
    found = planned.status()
    assert found["requests"] == {
        "promised": 1, "met": 0, "missed": 1, "infeasible": 0, "unexpected": 1, "unplanned": 0,
        "risk_limited": 0, "best_effort": 0, "shortened": 0,
    }  # fmt: skip
    assert found["last"]["mail"] == {
        "missed": ["ttft"],
        "infeasible": [],
        "worth": None,
        "ttft": {
            "promised": "70 ms",
            "promised_ms": 70.0,
            "expected_ms": 60.0,
            "measured_ms": 90.0,
            "level": 0.6,
        },
        "tpot": {
            "promised": "60 %",
            "promised_ms": 6.6,
            "expected_ms": 6.0,
            "measured_ms": 4.0,
            "level": 0.6,
        },
    }
    assert found["ttft_over_promise"]["1.25"] == 0
    assert found["ttft_over_promise"]["1.5"] == found["ttft_over_promise"]["inf"] == 1
    assert found["tpot_over_promise"]["0.8"] == 1


def test_what_cannot_be_kept_is_flagged_even_if_it_was():
    planned = Planned()
    planned.serve(0.01, promise=promise("20 ms"))
    assert planned.status()["requests"] == {
        "promised": 1, "met": 1, "missed": 0, "infeasible": 1, "unexpected": 0, "unplanned": 0,
        "risk_limited": 0, "best_effort": 0, "shortened": 0,
    }  # fmt: skip
    assert planned.status()["last"][""]["infeasible"] == ["ttft"]


def test_waiting_counts_as_time_but_not_as_the_machines():
    planned, notes = Planned(), {}
    waiting = Promise(Limit(0.2), waited_s=0.05)
    assert planned.serve(0.1, promise=waiting, notes=notes) == Levels(1.0)
    assert notes["deadlines"]["ttft"]["measured_ms"] == 150.0
    assert notes["deadlines"] == planned.status()["last"][""]
    expected = {"offset_ms": 0.0, "slope": 1.0}
    assert planned.status()["corrections"]["model.gguf: ttft"] == expected


def test_a_busy_machine_is_followed():
    planned = Planned()
    levels = [planned.serve(3 * x * 0.1, promise=promise("200 ms")) for x in (1.0,) * 10]
    assert levels[0] == Levels(1.0)
    assert levels[-1].prefill == 0.4  # 40 ms by the table
    assert planned.status()["last"][""]["ttft"]["expected_ms"] > 200


def test_another_plugins_level_is_not_planned_but_its_misses_are_counted():
    class Other:
        @hookimpl(tryfirst=True)
        def llmaas_level(self):
            return Levels(decode=0.8)

    planned = Planned()
    planned.hooks.register("other", Other())
    assert planned.serve(promise=promise("70 ms", "5 ms")) == Levels(0.6, 0.8)
    last = planned.status()["last"][""]
    assert (last["ttft"]["level"], last["tpot"]["level"]) == (0.6, None)
    assert (last["missed"], last["tpot"]["promised_ms"]) == ([], 5.0)
    planned.serve(tpot_s=0.006, promise=promise("70 ms", "5 ms"))
    assert planned.status()["last"][""]["missed"] == ["tpot"]
    assert planned.status()["requests"]["unexpected"] == 1
    planned.serve(tpot_s=0.006, promise=promise("70 ms", "50 %"))  # of 11 ms
    assert planned.status()["last"][""]["missed"] == ["tpot"]
    assert list(planned.status()["corrections"]) == ["model.gguf: ttft"]


def test_apps_are_corrected_apart():
    planned = Planned()
    for _ in range(10):
        planned.serve(tpot_s=0.5, app="grammar", promise=promise(tpot="20 ms"))
    assert planned.serve(app="mail", promise=promise(tpot="20 ms")) == Levels(decode=1.0)


def test_requests_that_end_before_a_token_do_not_count():
    planned = Planned()
    planned.serve(n=0, promise=promise("70 ms"))
    assert planned.status()["requests"]["promised"] == 0
    planned.serve(n=1, promise=promise("70 ms", "5 ms"))
    assert planned.status()["last"][""]["tpot"]["measured_ms"] is None


def test_requests_that_end_too_late_for_a_token_are_missed():
    """Clients leave because they have waited for too long."""
    planned, notes = Planned(), {}
    asked = promise("70 ms", "60 ms")
    planned.serve(promise=asked)
    before = planned.status()["corrections"]
    planned.serve(0.5, n=0, promise=asked, notes=notes)
    assert notes["deadlines"]["missed"] == ["ttft"]
    assert planned.status()["requests"]["unexpected"] == 1
    assert planned.status()["corrections"] == before


def test_without_measured_times_the_log_says_once_how_to_get_them(caplog):
    planned = Planned(times=False)
    assert planned.serve(promise=promise("70 ms")) is None
    planned.serve(promise=promise("70 ms"))
    assert planned.status()["requests"]["unplanned"] == 2
    assert caplog.text.count("llmaas elastic profile model.gguf") == 1
    assert planned.status()["last"][""]["ttft"]["measured_ms"] == 50.0


def test_a_freed_context_leaves_nothing():
    planned = Planned()
    planned.hooks.level(Request(planned.engine, PROMPT, None, promise=promise("70 ms")))
    planned.hooks.context_free(planned.engine.ctx)
    assert not planned.plugin._planned


def test_only_recent_apps_are_kept():
    planned = Planned()
    for i in range(100):
        planned.serve(app=str(i), promise=promise("70 ms"))
    assert len(planned.status()["last"]) == 64
    assert "99" in planned.status()["last"]


@pytest.mark.parametrize(
    "config",
    [
        {"ttft": 0.3},
        {"ttft": "fast"},
        {"tpot": "0 ms"},
        {"apps": {"mail": {"ttfd": "1 s"}}},
        {"apps": {"mail": "1 s"}},
    ],
)
def test_wrong_settings_are_refused(config):
    with pytest.raises(ValidationError):
        DeadlinesConfig.model_validate(config)


def test_a_block_needs_a_limit():
    with pytest.raises(ConfigError, match="needs a limit"):
        deadlines.slo()
    with pytest.raises(ConfigError, match=r"found 0\.3"):
        deadlines.slo(ttft=0.3)


def test_interrupted_requests_are_planned_apart_and_their_rest_is_no_slowness():
    planned = Planned({"ttft": "1 s", "tpot": "100 ms"})
    hooks, engine = planned.hooks, planned.engine
    notes = {}, {}
    outer, inner = (Request(engine, PROMPT, None, notes=one) for one in notes)
    for request in (outer, inner):
        hooks.request_begin(request, hooks.level(request))
    hooks.request_end(inner, RequestStats(100, 0, 11, 0.0, 0.1, 9.0, 0.1))
    away = RequestStats(100, 0, 11, 0.0, 0.9, 9.0, 0.6, first_away_s=0.8, decode_away_s=0.5)
    hooks.request_end(outer, away)
    report = hooks.status()["deadlines"]
    assert report["requests"]["met"] == 2
    assert notes[0]["deadlines"]["ttft"]["measured_ms"] == 900.0
    assert notes[0]["deadlines"]["tpot"]["measured_ms"] == 60.0
    for phase in ("ttft", "tpot"):
        assert report["corrections"][f"model.gguf: {phase}"] == {"offset_ms": 0.0, "slope": 1.0}


def test_slower_tokens_beside_others_do_not_spoil_predictions():
    """Tokens of a batch with others', and those after an interruption, take longer."""
    planned = Planned()
    asked, notes = promise("1 s", "100 ms"), {}
    planned.serve(0.11, 0.011, promise=asked)
    before = planned.status()["corrections"]
    slow = RequestStats(100, 0, 11, 0.0, 0.4, 9.0, 0.5, first_away_s=0.01, decode_away_s=0.01)
    for _ in range(9):  # ten would be a load that does not end
        request = Request(planned.engine, PROMPT, None, promise=asked, notes=notes)
        planned.hooks.request_begin(request, planned.hooks.level(request))
        planned.hooks.request_end(request, slow)
    assert notes["deadlines"]["tpot"]["measured_ms"] == 50.0
    assert planned.status()["corrections"] == before


def test_misses_of_requests_that_nobody_planned_are_counted():
    planned, notes = Planned(times=False), {}
    planned.serve(promise=promise("40 ms", "20 ms"), notes=notes)
    assert notes["deadlines"]["missed"] == ["ttft"]
    assert notes["deadlines"]["ttft"]["promised_ms"] == 40.0
    counts = planned.status()["requests"]
    assert (counts["unplanned"], counts["missed"], counts["unexpected"]) == (1, 1, 1)
    planned.serve(promise=promise("60 ms"))
    planned.serve(promise=promise("60 %"))  # of an unknown time
    counts = planned.status()["requests"]
    assert (counts["unplanned"], counts["missed"], counts["met"]) == (3, 1, 1)
    assert planned.status()["ttft_over_promise"]["inf"] == 2


@pytest.mark.parametrize(
    ("n_generated", "decode_s", "pending_s", "measured_ms", "missed"),
    [
        (1, 0.0, 60.0, 60_000, ["tpot"]),
        (6, 0.05, 0.55, 100, ["tpot"]),
        (6, 0.05, 0.04, 10, []),
        (6, 0.5, 0.04, 100, ["tpot"]),
        (1, 0.0, 0.04, None, []),
    ],
)
def test_a_further_token_that_does_not_come_in_time_is_a_miss(
    n_generated, decode_s, pending_s, measured_ms, missed
):
    planned, notes = Planned(), {}
    request = Request(planned.engine, PROMPT, None, promise=promise(tpot="50 ms"), notes=notes)
    planned.hooks.request_begin(request, planned.hooks.level(request))
    times = RequestStats(100, 0, n_generated, 0.0, 0.1, 99.0, decode_s, pending_s=pending_s)
    planned.hooks.request_end(request, times)
    assert notes["deadlines"]["missed"] == missed
    assert notes["deadlines"]["tpot"]["measured_ms"] == measured_ms
    corrections = planned.status()["corrections"]
    measured = {} if n_generated == 1 else {"offset_ms": 1000 * decode_s / 5 - 10, "slope": 1.0}
    assert corrections.get("model.gguf: tpot", {}) == measured  # the tables say 10 ms


def test_an_interrupted_answer_makes_up_for_lost_time(monkeypatch):
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    planned, notes = Planned(), {}
    asked = dataclasses.replace(promise(tpot="11.5 ms"), n_most=11)
    request = Request(planned.engine, PROMPT, None, promise=asked, notes=notes)
    levels = planned.hooks.level(request)
    planned.hooks.request_begin(request, levels)
    assert levels.at_first_token(np.zeros(3, np.float32)) == levels.decode == 1.0
    clock.now += 0.06  # 4 further tokens of 10 ms, and 20 ms of another request
    assert levels.at_resume(5) == 0.8
    clock.now += 0.03  # 2 tokens of 8 ms, and 14 ms of another request
    assert levels.at_resume(7) == 0.4
    clock.now += 0.016
    stats = RequestStats(100, 0, 11, 0.0, 0.05, 9.0, 0.106, decode_away_s=0.034)
    planned.hooks.request_end(request, stats)
    assert notes["deadlines"]["tpot"]["level"] == 0.4
    assert notes["deadlines"]["missed"] == []
    assert notes["deadlines"]["worth"] is None
    # the mean of ten tokens, 4 × 10 ms + 2 × 8 ms + 4 × 4 ms, as the tables say
    corrections = planned.status()["corrections"]["model.gguf: tpot"]
    assert corrections == {"offset_ms": 0.0, "slope": 1.0}
    assert levels.at_resume(9) == 1.0  # after its end


def test_certified_answers_and_those_of_other_plugins_are_not_planned_anew():
    planned = Planned()
    assert (
        planned.hooks.level(Request(planned.engine, PROMPT, None, promise=promise("1 s"))).at_resume
        is None
    )
    request = Request(planned.engine, PROMPT, None, promise=promise(tpot="11 ms"))
    levels = planned.hooks.level(request)
    planned.hooks.request_begin(request, Levels(decode=0.6))
    levels.at_first_token(np.zeros(3, np.float32))
    assert levels.at_resume(5) == 1.0
