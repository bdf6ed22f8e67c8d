"""The parts of ``llmaas tune`` that open no model: verdicts, switches and the record."""

from __future__ import annotations

import functools
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup.config_text import (
    Settings,
    check_ours,
    config_text,
    write_config,
    write_switches,
)
from llmaas_plugins.cli.switches import switched, switches
from llmaas_plugins.cli.tune import parts
from llmaas_plugins.cli.tune.bench import Engine
from llmaas_plugins.cli.tune.figures import Case, Figures, Pair, case_of
from llmaas_plugins.cli.tune.parts import Plan, parts_of, share_of
from llmaas_plugins.cli.tune.record import Kept, Record, key_of, record_path
from llmaas_plugins.cli.tune.verdicts import Verdict, verdict_on
from llmaas_plugins.cli.tune.worker import Followed
from llmaas_plugins.config import load_config
from llmaas_plugins.demo.interval import Interval
from llmaas_plugins.reference_model import reference_model_path

ON = Verdict(state="on", reason="it is")
FASTER, EQUAL, SLOWER = Interval(2, 1.5, 3), Interval(1, 0.9, 1.1), Interval(0.5, 0.4, 0.6)
SAME, WORSE, BETTER = Interval(0, 0, 0), Interval(0.3, 0.2, 0.4), Interval(-0.3, -0.4, -0.2)


def case(name, first=EQUAL, token=EQUAL, loss=SAME):
    return Case(
        name=name, first_speed=first, token_speed=token, agreement=1, loss_change=loss,
        is_same=True, n_pairs=6,
    )  # fmt: skip


def state_of(plugin, *cases, others=(), **figures):
    return verdict_on(plugin, Figures(cases=cases, **figures), dict(others)).state


def test_contexts_must_come_back_faster_and_alike():
    assert state_of("kv_chunks", case("from RAM", FASTER), case("from disk", SLOWER)) == "on"
    assert state_of("kv_chunks", case("from RAM", EQUAL), case("from disk", FASTER)) == "off"
    assert state_of("kv_chunks", case("from RAM", FASTER, loss=WORSE)) == "off"


def test_a_level_must_be_faster_than_the_whole_model():
    whole = case("level 1.0", FASTER)  # this does not count
    assert state_of("elastic", whole, case("level 0.6"), case("level 0.2", loss=WORSE)) == "off"
    assert state_of("elastic", whole, case("level 0.6"), case("level 0.2", FASTER)) == "on"
    assert state_of("elastic", case("level 0.2", token=FASTER, loss=WORSE)) == "on"
    source = case("prepared file", loss=WORSE)
    assert state_of("elastic", source, case("level 0.2", FASTER)) == "off"


def test_deadlines_follow_elastic_and_must_cost_nothing():
    named = case("nothing named")
    assert state_of("deadlines", named) == "off"
    for state in ("off", "failed", "broken"):
        elastic = {"elastic": Verdict(state=state, reason="it is")}
        assert state_of("deadlines", named, others=elastic) == "off"
    assert state_of("deadlines", named, others={"elastic": ON}) == "on"
    assert (
        state_of("deadlines", case("nothing named", token=SLOWER), others={"elastic": ON}) == "off"
    )


def test_streaming_is_for_models_that_do_not_fit():
    found = verdict_on("flash_weights", Figures(unserved="it fits"), {})
    assert (found.state, found.reason) == ("off", "it fits")
    assert state_of("flash_weights", case("exact", SLOWER, SLOWER)) == "on"
    assert state_of("flash_weights", case("exact"), case("sparse", token=SLOWER)) == "on"
    assert state_of("flash_weights", case("sparse", token=FASTER)) == "on"
    assert state_of("flash_weights", case("sparse", token=EQUAL)) == "off"


def test_a_datastore_must_surely_predict_better():
    assert state_of("knn_lm", case("unseen chats", loss=BETTER)) == "on"
    assert state_of("knn_lm", case("unseen chats", loss=WORSE)) == "off"
    assert state_of("knn_lm", case("unseen chats", loss=Interval(-0.3, -0.7, 0.1))) == "off"


def test_a_broken_promise_counts_more_than_speed():
    found = verdict_on("kv_chunks", Figures(cases=(case("from RAM", FASTER),), broken=("x",)), {})
    assert (found.state, found.reason, found.is_passed) == ("broken", "x", False)


def test_a_model_that_a_plugin_leaves_alone_needs_no_plugin():
    cases = (case("from RAM", FASTER),)
    found = verdict_on("kv_chunks", Figures(cases=cases, unserved="it is recurrent"), {})
    assert found.state == "off"
    assert "it is recurrent" in found.reason
    assert found.is_passed


def followed(seconds, losses, best=None):
    best = np.arange(len(losses)) if best is None else np.array(best)
    return Followed(seconds, seconds / 10, np.array(losses, np.float64), best)


def test_speeds_are_relative_to_vanilla_and_pairs_count_together():
    pairs = [
        Pair(followed(slow, [1.0, 2.0]), followed(slow / 2, [1.5, 2.5], [0, 2]))
        for slow in (1.0, 10.0, 2.0, 5.0, 1.0)  # the machine's load does not matter
    ]
    found = case_of("x", pairs)
    assert found.first_speed == Interval(2, 2, 2)
    assert found.token_speed == pytest.approx((2, 2, 2))
    assert found.loss_change == Interval(0.5, 0.5, 0.5)
    assert (found.agreement, found.is_same, found.n_pairs) == (0.5, False, 5)


def test_requests_of_the_same_text_are_no_independent_sample():
    changes = [0.0, 0.2, 0.0, 0.2, 0.4, 0.4]
    pairs = [Pair(followed(1, [1]), followed(1, [1 + change])) for change in changes]
    alone = case_of("x", pairs).loss_change
    groups = [1, 1, 1, 1, 2, 2]
    grouped = [one._replace(group=group) for one, group in zip(pairs, groups, strict=True)]
    together = case_of("x", grouped).loss_change
    assert together.high - together.low > alone.high - alone.low


def test_outputs_that_are_not_finite_are_no_figures():
    with pytest.raises(LlmaasError, match="not finite"):
        case_of("x", [Pair(followed(1, [1.0]), followed(1, [np.nan]))])


def test_time_that_a_part_leaves_goes_to_the_others():
    names = ["kv_chunks", "elastic", "together"]
    first = share_of("kv_chunks", names, 600)
    assert 0 < first < 600
    assert share_of("elastic", names[1:], 600 - first) == pytest.approx(first * 6 / 5)
    assert share_of("elastic", names[1:], 600) > share_of("elastic", names[1:], 600 - first)
    assert share_of("together", names[2:], 100) == 100
    assert share_of("together", names[2:], -5) == 0


class SlowProcess:
    """Process whose engine takes a while for each request."""

    def ask(self, request):
        time.sleep(0.02)


def test_what_there_is_no_time_for_is_left_out(tmp_path, monkeypatch):
    model = reference_model_path()
    tables = {"kv_chunks": {}, "elastic": {}, "deadlines": {}}
    plan = Plan(model, model, load_config({"plugins": tables}), (b"",), (), 0.3 / 60)
    n_asked = {"kv_chunks": 3, "elastic": 1000}

    def measure(name, bench):
        for _ in range(n_asked[name]):
            Engine(SlowProcess(), bench.check_time).follow(None)
        return Figures(unserved="nothing to serve")

    for name in n_asked:
        monkeypatch.setitem(parts._MEASURES, name, functools.partial(measure, name))
    began, said = time.monotonic(), []
    record = Record(tmp_path / "r", model)
    found = parts.measured(plan, record, said.append, is_fresh=False)
    assert time.monotonic() - began < 10  # a thousand requests take longer
    states = {name: outcome.verdict.state for name, outcome in found.items()}
    assert states == {"kv_chunks": "off", "elastic": "left out", "deadlines": "left out"}
    assert found["elastic"].verdict.is_passed
    assert all("part 3" not in line or "left out" in line for line in said)

    n_asked["elastic"] = 1  # the same command goes on
    found = parts.measured(plan, record, said.append, is_fresh=False)
    assert found["elastic"].verdict.state == "off"
    assert not any("part 1" in line for line in said[2:])


def test_deadlines_alone_are_off(tmp_path, monkeypatch):
    """A prepared model has widths, even if no table switches its levels on."""
    model = reference_model_path()
    prepared = SimpleNamespace(tables={"uniform": ()})
    monkeypatch.setattr(parts, "read_elastic", lambda _: prepared)
    plan = Plan(model, model, load_config({"plugins": {"deadlines": {}}}), (b"",), (), 1)
    found = parts.measured(plan, Record(tmp_path / "r", model), print, is_fresh=False)
    assert found["deadlines"].verdict.state == "off"
    assert "levels of elastic" in found["deadlines"].verdict.reason


def test_parts_are_those_of_the_configuration():
    tables = {"knn_lm": {"enabled": False}, "kv_chunks": {}, "llmaas-usage": {}}
    assert parts_of(load_config({"plugins": tables})) == ["kv_chunks", "knn_lm", "together"]
    assert parts_of(load_config({"plugins": {"llmaas-usage": {}}})) == []


# -- the record ----------------------------------------------------------------------------------


def test_a_part_is_known_by_what_it_measured(tmp_path):
    path, kept = tmp_path / "x.tune.json", Kept(key="k", seconds=1, figures=Figures(), verdict=ON)
    Record(path, tmp_path / "m.gguf").keep("elastic", kept)
    found = Record(path, tmp_path / "m.gguf")
    assert found.get("elastic", "k") == kept
    assert found.get("elastic", "other") is None
    assert found.get("knn_lm", "k") is None
    found.keep("knn_lm", kept)
    assert Record(path, tmp_path / "m.gguf").get("elastic", "k") == kept
    assert record_path(tmp_path / "llmaas.toml") == tmp_path / "llmaas.tune.json"


def test_figures_survive_the_file(tmp_path):
    figures = Figures(cases=(case("a", FASTER, None, WORSE),), peak_bytes=1, broken=("b",))
    kept = Kept(key="k", seconds=1, figures=figures, verdict=ON)
    Record(tmp_path / "r", tmp_path).keep("elastic", kept)
    assert Record(tmp_path / "r", tmp_path).get("elastic", "k").figures == figures


@pytest.mark.parametrize("content", ["", "{}", "[]", "\0", '{"version": 2}', "[" * 100_000])
def test_a_damaged_record_counts_as_none(tmp_path, content):
    path = tmp_path / "r"
    path.write_text(content)
    record = Record(path, tmp_path)
    assert record.get("elastic", "k") is None
    record.keep("elastic", Kept(key="k", seconds=1, figures=Figures(), verdict=ON))
    assert Record(path, tmp_path).get("elastic", "k")


def test_a_key_names_all_that_it_is_of():
    assert key_of("a", ["b"], {"c": 1, "d": 2}) == key_of("a", ["b"], {"d": 2, "c": 1})
    assert key_of("a", ["b"]) != key_of("a", ["c"])


# -- switches ------------------------------------------------------------------------------------

TOML = """\
# mine
on_error = "log"   # [plugins.elastic]

[plugins.kv_chunks]  # contexts
codec = "int8"
note = '''
[plugins.knn_lm]
enabled = true
'''

  [ plugins . "elastic" ]
# enabled = false
  enabled   =   true  # as asked
[plugins.deadlines.apps.mail]
ttft = "1 s"
[plugins.deadlines]
[plugins.knn_lm]"""


def test_only_the_switch_changes():
    text = switched(TOML, {"kv_chunks": False})
    assert text == TOML.replace("# contexts\n", "# contexts\nenabled = false\n")
    assert switched(text, {"kv_chunks": True}) == text.replace(
        "enabled = false\nco", "enabled = true\nco"
    )
    assert switched(TOML, {"kv_chunks": True, "elastic": True, "flash_weights": False}) == TOML
    text = switched(TOML, {"elastic": False})
    assert text == TOML.replace("enabled   =   true", "enabled   =   false")
    assert switched(TOML, {"knn_lm": False}) == TOML + "\nenabled = false\n"
    assert switched(TOML, {"deadlines": False}) == TOML.replace(
        "[plugins.deadlines]\n", "[plugins.deadlines]\nenabled = false\n"
    )


def test_several_switches_at_once():
    choice = {"kv_chunks": False, "elastic": False, "deadlines": False, "knn_lm": False}
    text = switched(TOML, choice)
    assert switches(text) == choice
    assert switches(switched(text, dict.fromkeys(choice, True))) == dict.fromkeys(choice, True)
    before, after = tomllib.loads(TOML), tomllib.loads(text)
    for table in (*before["plugins"].values(), *after["plugins"].values()):
        table.pop("enabled", None)
    assert before == after


def test_line_ends_and_marks_stay():
    text = "\ufeff# mine\r\n[plugins.elastic]\r\nenabled = true\r\n"
    assert switched(text, {"elastic": False}) == text.replace("true", "false")


@pytest.mark.parametrize(
    "text",
    [
        "plugins.elastic.level = 0.5\n",
        "plugins = {elastic = {}}\n",
        "[plugins]\nelastic = {level = 0.5}\n",
        "[plugins]\nelastic.level = 0.5\n",
        "[plugins.elastic.apps]\n",
        "note = '''\n[plugins.elastic]\n'''\n[plugins]\nelastic = {}\n",
    ],
)
def test_a_table_in_another_form_is_left_alone(text):
    with pytest.raises(ConfigError, match="elastic cannot be switched off without changing more"):
        switched(text, {"elastic": False})
    assert switched(text, {"elastic": True}) == text


@pytest.mark.parametrize("text", ["[", "plugins = 1\n", "plugins = [1]\n", "[plugins]\na = 1\n"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="the configuration"):
        switched(text, {"elastic": False})


def test_a_file_of_setup_stays_its_own(tmp_path):
    settings = Settings(
        *(tmp_path / "a.gguf", "0" * 64, tmp_path / "b.gguf", "1" * 64, "uniform"),
        *(True, None, False, None),
    )
    path = tmp_path / "llmaas.toml"
    write_config(path, config_text(settings))
    write_switches(path, {"elastic": False, "kv_chunks": True})
    check_ours(path)
    assert load_config(path).enabled() == ["kv_chunks", "deadlines", "flash_weights"]
    write_config(path, config_text(settings))  # it stays off until it is measured again
    assert load_config(path).enabled() == ["kv_chunks", "deadlines", "flash_weights"]
    check_ours(path)
    write_switches(path, {"elastic": True})
    assert "elastic" in load_config(path).enabled()

    path.write_text(path.read_text() + "# mine\n")
    write_switches(path, {"elastic": False})
    assert "elastic" not in load_config(path).enabled()
    with pytest.raises(ConfigError, match="was changed since"):
        check_ours(path)


# -- mistakes ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder, in a home that has no configuration."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LLMAAS_CONFIG", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, ["missing.gguf"], "found no file missing.gguf"),
        (None, [str(reference_model_path())], "found no llmaas.toml to tune: `llmaas setup"),
        ("", [str(reference_model_path())], "has no plugin that can be measured"),
        ("[plugins.other]\n", [str(reference_model_path())], "has no plugin that can be measured"),
        (
            "plugins.kv_chunks.codec = 'int8'\n",
            [str(reference_model_path())],
            "Begin its table with the header [plugins.kv_chunks]",
        ),
        ("[plugins.kv_chunks]\n", [str(reference_model_path()), "--text", "none.txt"], "none.txt"),
        ("[plugins.kv_chunks]\n", [str(reference_model_path()), "--chats", "no.json"], "no.json"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(content, options, message, folder, capsys):
    if content is not None:
        (folder / "llmaas.toml").write_text(content)
    assert main(["tune", *options]) == 2
    assert message in capsys.readouterr().err
    assert len([*folder.iterdir()]) == (content is not None)


def test_a_prepared_file_that_was_changed_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.gguf"
    model.write_bytes(reference_model_path().read_bytes())
    (tmp_path / "llmaas.toml").write_text(
        f'[models."{model}"]\nfile = "{model}"\ndigest = "{"0" * 64}"\nfile_digest = "{"0" * 64}"\n'
        "[plugins.kv_chunks]\n"
    )
    assert main(["tune", "model.gguf", "--config", "llmaas.toml"]) == 2
    assert (
        "was changed since. `llmaas setup model.gguf` prepares it again" in capsys.readouterr().err
    )
