"""Pure parts of ``llmaas demo``: order of calls, promises, memory, figures and their picture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.day.figures import Kept, as_json, figures_of, read_figures
from llmaas_plugins.cli.day.picture import picture
from llmaas_plugins.cli.day.prepared import Prepared, environment
from llmaas_plugins.cli.day.run import Day, Options
from llmaas_plugins.cli.day.systems import STATES, TOGETHER, VANILLA, Memory, System, systems_of
from llmaas_plugins.cli.day.table import bars, conclusions, table
from llmaas_plugins.cli.day.trace import (
    PROMISES,
    Call,
    Pace,
    calls_of,
    fitting,
    openings,
    order_of,
    talks_from,
)
from llmaas_plugins.cli.day.worker import Called, Usage
from llmaas_plugins.model.loading import vocabulary
from llmaas_plugins.reference_model import reference_model_path

MIB = 1 << 20
PACE = Pace([32, 128], [0.01, 0.04], [0.001, 0.002])
OPTIONS = Options(None, None, None, None, 24, 0.6, 1.0, 0, 2)


def called(first_s, further_s, best):
    return Called(first_s, further_s, len(best) - 1, 0.001, best, [1.0] * len(best))


@pytest.fixture
def day():
    """Return a day of two calls: ours is twice as fast, and has one other token of four."""
    calls = [PACE.promised(Call(app, i, [1] * 32, [1, 2])) for i, app in enumerate(("chat", "x"))]
    results = {
        VANILLA: [called(0.010, 0.001, [5, 6])] * 2,
        STATES: [called(0.004, 0.001, [5, 6])] * 2,
        TOGETHER: [called(0.005, 0.0001, [5, 6]), called(0.004, 0.0009, [5, 7])],
    }
    usage = {name: Usage(90 * MIB, 2 * MIB, 10 * MIB, {}) for name in results}
    files = Prepared(Path("m.gguf"), Path("m.gguf"), None, None, None, {"knn_lm": "no datastore"})
    budgets = {VANILLA: None, STATES: None, TOGETHER: 100 * MIB}
    return Day(
        OPTIONS, files, 2, 8 * MIB, 12 * MIB, 12 * MIB, PACE, calls, results, usage, budgets, 9.0
    )


def test_the_packaged_day_has_six_apps_and_their_promises():
    talks = talks_from(None)
    assert {talk.app for talk in talks} == PROMISES.keys()
    order = order_of(talks, 0)
    assert len(order) == sum(len(talk.turns) for talk in talks)
    assert order == order_of(talks, 0) != order_of(talks, 1)
    for context in range(len(talks)):
        assert [turn for one, turn in order if one == context] == [
            *range(len(talks[context].turns))
        ]


def test_a_prompt_goes_on_where_the_reply_before_ended():
    talks = talks_from(None)
    with vocabulary(reference_model_path()) as vocab:
        calls = calls_of(vocab, talks, [(0, 0), (0, 1)], 100)
        said = vocab.detokenize([*calls[0].answer]).decode()
    assert said.strip() == talks[0].turns[0][1]
    whole = [*calls[0].prompt, *calls[0].answer]
    assert [*calls[1].prompt][: len(whole)] == whole
    with vocabulary(reference_model_path()) as vocab:
        assert [len(call.answer) for call in calls_of(vocab, talks, [(0, 0)], 3)] == [3]


def test_a_conversation_ends_when_its_context_is_full():
    talk = talks_from(None)[0]
    long = talk._replace(turns=(talk.turns[0], ("word " * 1100, "Yes."), talk.turns[1]))
    with vocabulary(reference_model_path()) as vocab:
        assert len(calls_of(vocab, [long], [(0, 0), (0, 1), (0, 2)], 8)) == 1
        with pytest.raises(ConfigError, match="no conversation fits into a context of 1024"):
            calls_of(vocab, [long._replace(turns=long.turns[1:])], [(0, 0)], 8)


def test_promises_are_shares_of_the_whole_model():
    call = PACE.promised(Call("smart_reply", 0, [1] * 80, [1]))
    assert call.first_s == pytest.approx(0.4 * 0.025)
    assert call.further_s == pytest.approx(0.8 * 0.0015)
    assert PACE.promised(Call("summary", 0, [1], [1])) == Call("summary", 0, [1], [1])
    assert PACE.first(16) == pytest.approx(0.005)
    assert PACE.first(1000) == pytest.approx(0.04)


@given(st.lists(st.floats(0.01, 9), min_size=1), st.floats(-5, 50), st.integers(1, 9))
def test_as_many_of_the_last_calls_as_fit(seconds, most_s, least):
    n = fitting(seconds, most_s, least)
    assert min(least, len(seconds)) <= n <= len(seconds)
    if n > least:
        assert sum(seconds[len(seconds) - n :]) <= most_s * (1 + 1e-9)
    if least <= n < len(seconds):
        assert sum(seconds[len(seconds) - n - 1 :]) > most_s * (1 - 1e-9)


def test_contexts_are_opened_where_their_last_calls_begin():
    calls = [Call("chat", context, [i], [i]) for i, context in enumerate((0, 1, 0, 1, 2))]
    assert [call.prompt for call in openings(calls, 2)] == [[1], [2]]
    assert openings(calls, 5) == []


def test_features_without_their_files_are_left_out():
    assert len(systems_of({})) == 7
    left = systems_of({"elastic": "", "flash_weights": "", "knn_lm": ""})
    assert [system.plugins for system in left] == [(), (), ("kv_chunks",), ("kv_chunks",)]


def test_a_process_gets_the_shared_memory_beside_its_own():
    one = Memory.of(12 * MIB, 8 * MIB, Usage(100 * MIB, 2 * MIB, 0, {}))
    two = Memory.of(20 * MIB, 8 * MIB, Usage(100 * MIB, 2 * MIB, 0, {}))
    assert (one.beside, two.beside) == (4 * MIB, 12 * MIB)
    assert two.process - one.process == 8 * MIB
    assert 90 * MIB < one.process - 12 * MIB < 120 * MIB
    assert Memory.of(4 * MIB, 8 * MIB) == Memory(None, 0)


@pytest.mark.parametrize(
    ("plugins", "shared", "keeps"),
    [
        (("kv_chunks",), 12, True),
        (("kv_chunks",), 4, False),
        (("kv_chunks", "flash_weights"), 4, True),
        (("elastic", "deadlines"), 12, False),
    ],
)
def test_which_systems_keep_a_limit(plugins, shared, keeps):
    assert System("one", plugins).keeps_limit(shared, 8) is keeps


def test_figures(day):
    found = figures_of(day)
    assert found[VANILLA].first_kept == Kept(0, 2)
    assert found[TOGETHER].first_kept == Kept(2, 2)
    assert found[VANILLA].further_kept == found[TOGETHER].further_kept == Kept(2, 2)
    assert found[TOGETHER].speed.value == pytest.approx(24 / 12)
    assert found[TOGETHER].speed.low <= 2 <= found[TOGETHER].speed.high
    assert found[TOGETHER].agreement.value == 0.75
    assert found[VANILLA].agreement == found[VANILLA].speed == (1, 1, 1)
    assert found[VANILLA].perplexity == pytest.approx(2.718, abs=1e-3)
    again = json.loads(json.dumps(as_json(day, found)))
    assert {name: read_figures(one) for name, one in again["systems"].items()} == found


def test_the_report_says_what_was_compared(day):
    found = figures_of(day)
    text = "\n".join([*table(found), *bars(found), *conclusions(day, found)])
    assert "2.00× as fast as vanilla (95 % interval 1.97–2.03)" in text
    assert "about as fast as (1.00×) vanilla with state files" in text
    assert "75% of the most likely tokens" in text
    assert "knn_lm is left out: no datastore" in text
    assert "only a cgroup" not in text
    assert len({len(line) for line in [*table(found)]}) == 1


def test_the_picture_names_each_system_once(day):
    svg = ET.fromstring(picture(figures_of(day), "a < b"))
    said = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in said
    assert (said.count(VANILLA), said.count(TOGETHER)) == (1, 1)


def test_variables_are_put_back(monkeypatch):
    monkeypatch.setenv("DAY_KEPT", "before")
    monkeypatch.delenv("DAY_NEW", raising=False)
    with environment({"DAY_KEPT": "a", "DAY_NEW": "b"}):
        assert (os.environ["DAY_KEPT"], os.environ["DAY_NEW"]) == ("a", "b")
    assert os.environ["DAY_KEPT"] == "before"
    assert "DAY_NEW" not in os.environ
