"""Limits of the risk on a fake engine: certified settings, and the choice at the first token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from answered import LEVELS, N_ANSWER, answers

from llmaas_hooks import (
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
from llmaas_hooks.testing import FakeEngine
from llmaas_plugins.deadlines import answers as module
from llmaas_plugins.deadlines.answers import answers_path
from llmaas_plugins.deadlines.config import DeadlinesConfig, Risk
from llmaas_plugins.deadlines.plugin import Deadlines

PROMPT = np.arange(100, dtype=np.int32)
ID = "0" * 32
TIMES = tuple(
    LevelTimes(level, lambda n, x=level: x * n / 1000, lambda _n, x=level: x / 100)
    for level in LEVELS
)
SETTINGS = {"max_risk": 0.1, "answer_tokens": N_ANSWER}


class Measured:
    @hookimpl
    def llmaas_cost(self):
        return RequestCost(levels=TIMES, levels_id=ID)


class Served:
    """Manager with the plugin, and one engine."""

    def __init__(self, **settings):
        self.hooks = HookManager("raise")
        self.plugin = Deadlines(DeadlinesConfig.model_validate(settings))
        self.hooks.register("deadlines", self.plugin)
        self.hooks.register("elastic", Measured())
        self.engine = FakeEngine(llama=SimpleNamespace(model_path="model.gguf"))

    def serve(self, margin=5.0, ttft=None, tpot=None, override=None, **facts):
        """Serve a request; return the levels of its prompt and of its answer, and its notes."""
        promise = Promise(*(None if one is None else Limit.of(one) for one in (ttft, tpot)))
        notes = {}
        request = Request(self.engine, PROMPT, None, promise=promise, notes=notes, **facts)
        levels = self.hooks.level(request)
        levels = levels if override is None else override.over(levels)
        self.hooks.request_begin(request, levels)
        found = levels or Levels()
        decode = found.decode
        if found.at_first_token is not None:
            logits = np.array([0.0, margin, -9.0], np.float32)
            decode = found.at_first_token(logits)
            assert logits.tolist() == pytest.approx([0.0, margin, -9.0])
        first_s, others_s = (found.prefill or 1) / 10, (decode or 1) / 10  # as the table says
        self.hooks.request_end(request, RequestStats(100, 0, 11, 0.0, first_s, 1.0, others_s))
        return (found.prefill, decode), notes.get("deadlines")

    def counts(self):
        return self.hooks.status()["deadlines"]["requests"]


@pytest.fixture(autouse=True)
def learned(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)

    def save(app=None, **about):
        answers(4000, **about).save(answers_path(ID, app), ID)

    return save


def test_without_a_risk_answers_say_what_the_setting_is_worth(learned):
    served = Served(answer_tokens=N_ANSWER)
    assert served.serve(ttft="90 ms")[1]["worth"] is None
    learned()
    levels, notes = served.serve(ttft="90 ms", tpot="70 %")
    assert levels == (0.8, 0.6)
    assert 0.88 < notes["worth"] < 0.99
    assert "max_risk" not in notes
    assert served.serve(ttft="90 ms")[1]["worth"] > notes["worth"]
    assert served.counts()["risk_limited"] == 0


def test_a_risk_uses_the_fastest_certified_setting_even_without_a_promise(learned):
    learned()
    served = Served(**SETTINGS)
    levels, notes = served.serve()
    assert levels < (1.0, 1.0)
    assert notes["certified_risk"] <= 0.1
    assert notes["max_risk"] == 0.1
    assert notes["ttft"]["promised_ms"] is None
    assert notes["ttft"]["measured_ms"] == 100 * levels[0]
    assert notes["missed"] == []
    expected = {"promised": 0, "met": 0, "risk_limited": 1, "best_effort": 0}
    assert served.counts() | expected == served.counts()


def test_the_first_tokens_margin_chooses_the_answers_level(learned):
    learned(risk=0.1, prefill_risk=0.2)
    served = Served(**SETTINGS)
    (prefill, sure), notes = served.serve(margin=5.0)
    assert prefill == 1.0
    assert notes["tpot"]["level"] == sure
    assert notes["margin"] == 5.0
    (_, unsure), other = served.serve(margin=0.01)
    assert sure < unsure
    assert other["worth"] <= 1
    assert other["tpot"]["level"] == unsure


def test_what_is_certified_must_keep_the_promise_too(learned):
    learned()
    served = Served(**SETTINGS)
    (prefill, decode), notes = served.serve(ttft="50 ms")
    assert prefill == 0.4
    assert notes["certified_risk"] <= 0.1
    assert served.counts()["best_effort"] == 0
    learned(risk=0.2, prefill_risk=0.2)
    served = Served(**SETTINGS)
    (prefill, decode), notes = served.serve(ttft="70 ms", tpot="70 %")
    assert (prefill, decode) == (0.6, 0.6)  # the best that the limits allow
    assert notes["certified_risk"] is None
    assert served.counts()["best_effort"] == 1


def test_without_learned_answers_only_the_whole_model_is_certified(caplog):
    served = Served(**SETTINGS)
    levels, notes = served.serve()
    assert levels == (1.0, 1.0)
    assert notes["certified_risk"] == 0
    for _ in range(2):
        levels, notes = served.serve(tpot="70 %")
        assert levels == (None, 0.6)
        assert notes["certified_risk"] is None
    assert served.counts()["best_effort"] == 2
    assert caplog.text.count("llmaas deadlines learn model.gguf") == 1


def test_levels_that_others_set_are_not_certified(learned):
    learned(risk=0.1, prefill_risk=0.2)
    served = Served(**SETTINGS)
    levels, notes = served.serve(override=Levels(prefill=0.4))
    assert levels[0] == 0.4
    assert notes["certified_risk"] is None
    assert notes["worth"] is None
    asked = served.serve(levels=Levels(0.4, 0.4))[1]
    assert asked["certified_risk"] is None
    assert served.counts()["best_effort"] == 2


def test_apps_have_risks_of_their_own(learned):
    learned()
    served = Served(apps={"mail": SETTINGS})
    assert served.serve() == ((None, None), None)
    assert served.serve(app="mail")[1]["max_risk"] == 0.1
    config = DeadlinesConfig(
        max_risk=0.2, confidence=0.9, apps={"mail": {"max_risk": 0.1, "answer_tokens": 2}}
    )
    assert config.risk_of("mail") == Risk(0.1, 0.9)
    assert config.risk_of("notes") == config.risk_of(None) == Risk(0.2, 0.9)
    assert (config.n_answer_of("mail"), config.n_answer_of(None)) == (2, 8)


@pytest.mark.parametrize(
    "config",
    [
        *({"max_risk": one} for one in (0, 1, -0.1, "low")),
        *({"confidence": one} for one in (0, 1, 0.2)),
        *({"answer_tokens": one} for one in (0, 65, 1.5)),
    ],
)
def test_wrong_risks_are_refused(config):
    with pytest.raises(ValueError, match=next(iter(config))):
        DeadlinesConfig.model_validate(config)
