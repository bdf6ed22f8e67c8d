"""Hooks of deadlines beside a plugin that shortens prompts, on a fake engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from answered import LEVELS, N_ANSWER, answers, with_shorter

from llmaas_hooks import (
    HookManager,
    Levels,
    LevelTimes,
    Limit,
    Promise,
    Request,
    RequestCost,
    RequestStats,
    ShorterPrompt,
    hookimpl,
)
from llmaas_hooks.testing import FakeEngine
from llmaas_plugins.deadlines import answers as module
from llmaas_plugins.deadlines.answers import answers_path
from llmaas_plugins.deadlines.config import DeadlinesConfig
from llmaas_plugins.deadlines.plugin import Deadlines

PROMPT = np.arange(100, dtype=np.int32)
ID, SECONDS = "0" * 32, 0.002
TIMES = tuple(
    LevelTimes(level, lambda n, x=level: x * n / 1000, lambda n, x=level: x * n / 10_000)
    for level in LEVELS
)


class Measured:
    @hookimpl
    def llmaas_cost(self):
        return RequestCost(levels=TIMES, levels_id=ID)


class Shortener:
    """Plugin that keeps the last tokens of a prompt; ``n_less`` fewer than it announces."""

    def __init__(self, n_less=0, *, refuses=False, fails=False):
        self.n_less, self.refuses, self.fails, self.asked = n_less, refuses, fails, []

    @hookimpl
    def llmaas_cost(self, request):
        n = len(request.tokens)
        shorter = (ShorterPrompt(share, int(share * n), SECONDS) for share in (0.7, 0.5))
        return RequestCost(shorter=tuple(shorter))

    @hookimpl
    def llmaas_shorten(self, request, share):
        self.asked.append(share)
        if self.fails:
            raise ValueError("no words")
        if self.refuses or share is None:
            return None
        return request.tokens[-(int(share * len(request.tokens)) - self.n_less) :]


class Served:
    """Manager with the plugins, and one engine."""

    def __init__(self, shortener=None, on_error="raise", **settings):
        self.hooks = HookManager(on_error)
        self.shortener = shortener or Shortener()
        self.plugin = Deadlines(DeadlinesConfig.model_validate(settings))
        self.hooks.register("deadlines", self.plugin)
        self.hooks.register("elastic", Measured())
        self.hooks.register("short_prompts", self.shortener)
        self.engine = FakeEngine(llama=SimpleNamespace(model_path="model.gguf"))

    def begin(self, request):
        """Begin a request as the host does; return its levels, and the request that goes on."""
        levels = self.hooks.level(request)
        share = request.levels.over(levels).prompt_share
        tokens = None if share == 1 else self.hooks.shorten(request, share)
        if tokens is not None:
            request = replace(request, tokens=tokens, whole=request)
        self.hooks.request_begin(request, levels)
        return levels, request

    def serve(self, ttft=None, tpot=None, slower=1.0, **facts):
        """Serve a request as the tables say; return its setting, and its notes."""
        promise = Promise(*(None if one is None else Limit.of(one) for one in (ttft, tpot)))
        notes = {}
        asked = Request(self.engine, PROMPT, None, promise=promise, notes=notes, **facts)
        levels, request = self.begin(asked)
        levels = levels or Levels()
        n_read, n_out = len(request.tokens), 11
        ttft_s = (levels.prefill or 1) * n_read / 1000 + (request.whole is not None) * SECONDS
        tpot_s = (levels.decode or 1) * n_read / 10_000
        times = slower * ttft_s, 1.0, slower * tpot_s * (n_out - 1)
        self.hooks.request_end(request, RequestStats(n_read, 0, n_out, 0.0, *times))
        setting = levels.prompt_share, levels.prefill, levels.decode
        return setting, notes.get("deadlines")

    def status(self):
        return self.hooks.status()["deadlines"]


@pytest.fixture
def learned(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)

    def save(risk=0.0, **about):
        found = with_shorter(answers(3000, **about), risk=risk)
        found.save(answers_path(ID, None), ID)

    return save


def test_a_promise_that_no_level_keeps_shortens_the_prompt():
    served = Served()
    setting, notes = served.serve("39 ms")
    assert setting == (0.7, 0.4, None)
    assert served.shortener.asked == [0.7]
    assert notes["prompt"] == {"share": 0.7, "left_out": 30, "choosing_ms": 2.0}
    assert notes["ttft"]["expected_ms"] == notes["ttft"]["measured_ms"] == 30.0
    assert (notes["missed"], notes["infeasible"]) == ([], [])
    assert served.status()["last"][""] == notes
    assert served.status()["requests"]["shortened"] == 1
    assert not served.plugin._planned


def test_a_promise_that_levels_keep_leaves_the_prompt_whole():
    served = Served()
    setting, notes = served.serve("90 ms")
    assert setting == (1.0, 0.8, None)
    assert served.shortener.asked == []
    assert notes["prompt"] == {"share": 1.0, "left_out": 0, "choosing_ms": 0.0}
    assert served.status()["requests"]["shortened"] == 0
    assert served.serve() == ((None, None, None), None)  # without a promise the plugin decides
    assert served.shortener.asked == [None]


def test_worth_decides_between_a_shorter_prompt_and_a_narrower_level(learned):
    learned(prefill_risk=0.3)
    setting, notes = Served(answer_tokens=N_ANSWER).serve("70 ms")
    assert setting == (0.5, 1.0, None)
    assert notes["worth"] > 0.9
    learned(risk=0.3, prefill_risk=0.02)
    setting, notes = Served(answer_tokens=N_ANSWER).serve("70 ms")
    assert setting == (1.0, 0.6, None)
    assert 0.9 < notes["worth"] < 1


@pytest.mark.parametrize("how", ["refuses", "fails"])
def test_a_prompt_that_stays_whole_although_planned_is_judged_as_whole(how, learned):
    learned(risk=0.3)
    served = Served(Shortener(**{how: True}), "log", answer_tokens=N_ANSWER)
    setting, notes = served.serve("39 ms", "3.2 ms")
    assert setting == (0.7, 0.4, 0.4)
    assert notes["prompt"] == {"share": 1.0, "left_out": 0, "choosing_ms": 0.0}
    assert notes["ttft"]["expected_ms"] == notes["ttft"]["measured_ms"] == 40.0
    assert notes["tpot"]["expected_ms"] == notes["tpot"]["measured_ms"] == 4.0
    assert notes["infeasible"] == notes["missed"] == ["ttft", "tpot"]
    assert notes["worth"] is not None  # that of the whole prompt at these levels
    assert served.status()["requests"]["unexpected"] == 0
    for phase in ("ttft", "tpot"):
        assert served.status()["corrections"][f"model.gguf: {phase}"]["slope"] == 1.0


def test_corrections_learn_from_the_tokens_that_were_read():
    served = Served(Shortener(n_less=20))
    setting, notes = served.serve("39 ms", "3.2 ms")
    assert setting == (0.7, 0.4, 0.4)
    assert notes["prompt"] == {"share": 0.7, "left_out": 50, "choosing_ms": 2.0}
    assert notes["ttft"]["expected_ms"] == notes["ttft"]["measured_ms"] == 22.0
    assert notes["tpot"]["expected_ms"] == notes["tpot"]["measured_ms"] == 2.0
    expected = {"offset_ms": 0.0, "slope": 1.0}
    for phase in ("ttft", "tpot"):
        assert served.status()["corrections"][f"model.gguf: {phase}"] == expected


def test_a_slow_machine_needs_shorter_prompts():
    served = Served()
    settings = [served.serve("45 ms", slower=1.3)[0] for _ in range(6)]
    assert settings[0] == (1.0, 0.4, None)
    assert settings[-1] == (0.7, 0.4, None)


def test_the_app_s_own_share_goes_first():
    served = Served()
    _, notes = served.serve("100 ms", levels=Levels(prompt_share=0.5))
    assert notes["prompt"]["left_out"] == 50
    assert notes["ttft"]["level"] == 1.0
    _, notes = served.serve("30 ms", levels=Levels(prompt_share=1.0))
    assert notes["prompt"]["left_out"] == 0
    assert notes["infeasible"] == ["ttft"]
    declined = {"declined": frozenset({"elastic"}), "levels": Levels(prompt_share=0.5)}
    _, notes = served.serve("60 ms", **declined)
    assert (notes["prompt"]["left_out"], notes["ttft"]["level"]) == (50, 1.0)


def test_with_a_limit_of_the_risk_the_prompt_stays_whole(learned, caplog):
    learned()
    served = Served(max_risk=0.1, answer_tokens=N_ANSWER)
    setting, notes = served.serve("39 ms")
    assert setting[:2] == (1.0, 0.4)
    assert notes["certified_risk"] is None
    assert notes["prompt"]["left_out"] == 0
    setting, notes = served.serve()
    assert setting[0] == 1.0
    assert notes["certified_risk"] <= 0.1
    _, notes = served.serve(levels=Levels(prompt_share=0.5))
    assert notes["certified_risk"] is None
    assert served.shortener.asked == [0.5]
    assert "no times were measured" not in caplog.text


def test_a_request_is_known_before_and_after_its_prompt_is_shortened():
    served = Served()
    promise, notes = Promise(tpot=Limit(0.003), n_most=11), [{}, {}]
    begun = [
        served.begin(Request(served.engine, PROMPT, None, promise=promise, notes=one))
        for one in notes
    ]
    for levels, request in begun:
        assert request.whole is not None
        assert levels.at_first_token(np.zeros(3, np.float32)) == 0.4
        assert levels.at_resume(5) == 0.4
    for _, request in reversed(begun):
        served.hooks.request_end(request, RequestStats(70, 0, 11, 0.0, 0.01, 1.0, 0.02))
    assert all(one["deadlines"]["tpot"]["measured_ms"] == 2.0 for one in notes)
    served.begin(Request(served.engine, PROMPT, None, promise=promise))
    served.hooks.context_free(served.engine.ctx)
    assert not served.plugin._planned
