"""The study of promises under load: promises in ms, the search for goodput, and tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_eval.deadlines.loaded import plots, probes, report, study
from llmaas_eval.deadlines.loaded.answers import Kept
from llmaas_eval.deadlines.loaded.goodput import highest, rate_of, step_of
from llmaas_eval.deadlines.loaded.limits import (
    Idle,
    Size,
    constant_levels,
    possible_share,
    times_of,
)
from llmaas_eval.deadlines.loaded.load import Answer, Limits
from llmaas_eval.deadlines.loaded.probes import Case, Probe, Served
from llmaas_eval.deadlines.loaded.quality import WHOLE, AppScores, Setting, outcomes, setting_of
from llmaas_eval.deadlines.loaded.recorder import Record, key_of, read_records
from llmaas_eval.deadlines.loaded.scoring import Scores, unanswered
from llmaas_eval.deadlines.loaded.systems import COMPRESSED, SYSTEMS, config_text
from llmaas_eval.deadlines.loaded.traces import APP_NAMES, SHARES, Shares, trace
from llmaas_plugins.config import load_config
from llmaas_plugins.elastic.latency import Curves, Latency, Machine

LEVELS = (1.0, 0.5, 0.2)
EACH = dict.fromkeys(APP_NAMES, 50)


# -- promises ------------------------------------------------------------------------------------


def latency():
    """Return times of a machine on which a prompt token takes a level's ms, and an answer's ten."""
    common = {"n_tokens": (1, 1001), "spread_ms": (((0.0, 0.0),) * 3,), "held": (501,)}
    ttft = tuple((level, 1001 * level) for level in LEVELS)
    tpot = tuple((10 * level,) * 2 for level in LEVELS)
    return Latency(
        model="m",
        table="uniform",
        machine=Machine.this(),
        levels=LEVELS,
        threads=(1,),
        ttft=Curves(ms=(ttft,), held_ms=(tuple((501 * level,) for level in LEVELS),), **common),
        tpot=Curves(ms=(tpot,), held_ms=(tuple(row[:1] for row in tpot),), **common),
    )


def times():
    """Return times that are a tenth slower than the table, and 5 ms to restore a prefix."""
    cold = [Idle("Rewind", "cold", 200, 220.0, 11.0)] * 3
    return times_of(latency(), [*cold, Idle("Rewind", "warm", 20, 27.0, 11.0)])


def test_promises_are_shares_of_the_whole_models_cold_time():
    found = times()
    assert found.limits(SHARES["GMail"], Size(200, 20)) == pytest.approx((176.0, 9.9))
    assert found.ttft_ms(0.5, Size(200, 20), "cold") == pytest.approx(110.0)
    assert found.ttft_ms(0.5, Size(200, 20), "warm") == pytest.approx(16.0)


def test_times_need_a_cold_request():
    with pytest.raises(ValueError, match="no cold requests"):
        times_of(latency(), [])


def test_constant_levels_are_the_widest_that_keep_the_promise():
    sizes = [Size(200, 20)] * 20
    assert constant_levels(times(), SHARES["Octopus"], sizes, "cold") == (0.5, 0.5)
    assert constant_levels(times(), SHARES["Octopus"], sizes, "warm") == (1.0, 0.5)
    assert constant_levels(times(), SHARES["Octopus"], sizes, "warm", is_one=True) == (0.5, 0.5)
    assert constant_levels(times(), SHARES["Rewind"], sizes, "cold") == (1.0, 1.0)
    assert constant_levels(times(), SHARES["Rewind"], sizes, "warm", headroom=0.9) == (1.0, 0.5)
    assert constant_levels(times(), Shares(0.1, 0.1), sizes, "cold") == (
        0.2,
        0.2,
    )  # nothing keeps it


def test_long_questions_narrow_an_apps_constant_levels():
    sizes = [Size(200, 20)] * 18 + [Size(200, 150)] * 2  # more than a twentieth are long
    assert constant_levels(times(), SHARES["Octopus"], sizes, "warm")[0] == 0.5
    assert constant_levels(times(), SHARES["Octopus"], sizes[:19], "warm")[0] == 0.5
    assert constant_levels(times(), SHARES["Octopus"], sizes[:18], "warm")[0] == 1.0


def test_possible_promises_are_those_that_an_idle_machine_keeps():
    sizes = [(app, Size(200, 20)) for app in APP_NAMES]
    whole = dict.fromkeys(APP_NAMES, (1.0, 1.0))
    assert possible_share(times(), SHARES, whole, sizes, "warm") == pytest.approx(1 / 6)
    narrow = dict.fromkeys(APP_NAMES, (0.2, 0.2))
    assert possible_share(times(), SHARES, narrow, sizes, "cold") == 1


def test_shorter_cold_prompts_make_more_promises_possible():
    sizes, half = [("Gboard", Size(200, 20))] * 5, {"Gboard": (0.5, 0.5)}
    assert possible_share(times(), SHARES, half, sizes, "cold") == 0
    assert possible_share(times(), SHARES, half, sizes, "cold", 0.41) == 0
    assert possible_share(times(), SHARES, half, sizes, "cold", 0.4) == 1


def test_an_incomplete_answer_keeps_nothing():
    limits = Limits(10.0, 5.0)
    assert Answer(0, 10.0, 6.0, 16, None).met(limits) == (True, False)
    assert Answer(0, 1.0, 1.0, 9, "9 of 16 tokens").met(limits) == (False, False)
    assert Answer(0, None, None, 0, "ConnectionResetError").met(limits) == (False, False)


# -- goodput -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [-20, -9, -1, 0, 3, 7, 19])
@pytest.mark.parametrize("start", [-5, 0, 4])
def test_the_search_finds_the_highest_rate_and_tries_none_twice(capacity, start):
    tried = []

    def passes(step):
        tried.append(step)
        return step <= capacity

    assert highest(passes, start, -20, 20) == capacity
    assert len(tried) == len({*tried}) <= 10


def test_the_search_ends_at_its_limits():
    assert highest(lambda _: False, 0, -20, 20) is None
    assert highest(lambda _: True, 0, -20, 20) == 20


def test_goodput_of_a_simulated_server():
    """A queue with one server and constant times: its highest rate follows from its arrivals."""
    arrivals = trace(0.0, 300, 0, EACH)

    def met(step):
        free, kept = 0.0, 0
        for one in arrivals:
            came = one.at / rate_of(step)
            free = max(free, came) + 0.5
            kept += free - came <= 1.5
        return kept / len(arrivals)

    step = highest(lambda step: met(step) >= 0.9, 0, -24, 24)
    assert met(step) >= 0.9 > met(step + 1)
    assert 1.0 < rate_of(step) < 2.0  # it can serve two a second
    assert step_of(rate_of(step)) == step


# -- systems -------------------------------------------------------------------------------------


def test_only_planned_or_scheduled_systems_have_promises(tmp_path):
    text = config_text(SYSTEMS["fifo-constant"], "cold", {"Rewind": "k" * 16}, tmp_path)
    assert "deadlines" not in text
    assert "kv_chunks" not in text
    path = tmp_path / "llmaas.toml"
    path.write_text(text)
    assert load_config(path, {}).service.key_file == tmp_path / "keys.toml"
    assert (tmp_path / "keys.toml").stat().st_mode & 0o777 == 0o600
    ours = config_text(SYSTEMS["ours"], "cold", {}, tmp_path)
    assert 'schedule = "deadline"\npreempt = true' in ours
    assert "[plugins.kv_chunks]" in ours
    assert "preempt = false" in config_text(SYSTEMS["edf-constant"], "warm", {}, tmp_path)
    assert "short_prompts" not in ours


def test_shorter_prompts_have_the_encoders_words(tmp_path):
    text = config_text(SYSTEMS["ours-shorter"], "cold", {}, tmp_path)
    assert '[plugins.short_prompts]\nscorer = "encoder"\nshares = [0.7, 0.5, 0.3, 0.2]' in text


def test_shorter_prompts_need_a_trained_encoder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    plan = study.Plan((), ("ours-shorter",), (), (), (), 12, 0, 1, "tiny", (), 0, None, None)
    with pytest.raises(ValueError, match="`llmaas prompts learn` trains one"):
        study.run(plan, {}, tmp_path)


def test_records_of_the_service_are_read_by_their_prompt(tmp_path):
    path = tmp_path / "requests.jsonl"
    assert read_records(path) == {}
    record = Record(key_of(" Who sings?\n"), 0.5, 1.0, 3, 16, True, ["ttft"], 12.0)
    path.write_text(f"{json.dumps(record._asdict())}\n" * 2)
    assert read_records(path) == {key_of("Who sings?"): record}


# -- rows and tables -----------------------------------------------------------------------------


def served(number, app, *, is_met=True, levels=(0.5, 1.0), infeasible=(), share=1.0):
    return Served(number, app, number, 1.0, 1.0, is_met, True, levels, infeasible, 0, None, share)


def probe(system, rate=1.0, alpha=0.0, n_missed=0):
    """Return a probe of a dozen requests, whose first ones missed the first token."""
    some = [
        served(i, APP_NAMES[i % 6], is_met=i >= n_missed, infeasible=("ttft",) if i == 0 else ())
        for i in range(12)
    ]
    return Probe(Case(system, "warm", alpha), rate, some, None)


def test_a_probe_passes_if_enough_requests_keep_both_limits():
    assert probe("ours", n_missed=1).passes(0.9)
    assert not probe("ours", n_missed=2).passes(0.9)
    assert not probe("ours")._replace(served=[], most_missed=1).passes(0.0)  # it ended early


def test_a_summary_counts_by_app_and_tells_silent_misses_from_flagged_ones():
    found = study.summary(probe("ours", n_missed=2))["apps"]
    assert found["XiaoAi"] == {
        "n": 2, "ttft": 1, "tpot": 2, "both": 1, "flagged": 1, "silent": 0, "failed": 0,
        "levels": [0.5, 1.0], "shortened": 0, "read": 1.0,
    }  # fmt: skip
    assert (found["Gboard"]["both"], found["Gboard"]["silent"]) == (1, 1)


def test_probes_are_kept_and_one_that_ended_early_is_repeated_only_for_a_lower_bar(
    tmp_path, monkeypatch
):
    measured = []

    def measure(self, case, rate, most_missed):
        measured.append(most_missed)
        found = probe(case.system, rate, n_missed=3)
        return found if most_missed is None or most_missed >= 3 else found._replace(
            served=[], most_missed=most_missed
        )  # fmt: skip

    monkeypatch.setattr(probes.Probes, "_measure", measure)
    kept = probes.Probes(None, tmp_path, 12, 0)
    case = Case("ours", "warm", 0.0)
    assert not kept.probe(case, 0, 0.9).passes(0.9)
    assert not kept.probe(case, 0, 0.9).passes(0.9)
    assert kept.done() == []
    assert kept.probe(case, 0, 0.5).passes(0.5)
    again = probes.Probes(None, tmp_path, 12, 0).probe(case, 0)
    assert measured == [1, 6]
    assert again.met == 9
    assert again.served[0].levels == [0.5, 1.0]
    assert [one.case for one in kept.done()] == [case]


def test_a_folder_of_other_traces_is_refused(tmp_path):
    plan = study.Plan((), (), (), (), (), 12, 0, 1, "tiny", (), 0, None, None)
    study.check_folder(tmp_path, plan, "packaged text")
    study.check_folder(tmp_path, plan, "packaged text")
    with pytest.raises(ValueError, match="give another --out"):
        study.check_folder(tmp_path, plan, "data sets")


def app_scores():
    """Return answers to twelve questions: narrow prompts make every second one wrong."""
    whole = Scores(np.zeros(12, np.int32), np.ones(12, np.float32))
    narrow = Scores(np.arange(12, dtype=np.int32) % 2, np.full(12, 3.0, np.float32))
    short = Scores(np.zeros(12, np.int32), np.full(12, 1.5, np.float32))
    by_setting = {WHOLE: whole, Setting(1.0, 1, 0): narrow, Setting(0.3, 1, 0): short}
    return AppScores(by_setting, LEVELS, {i: i for i in range(12)}, whole, [0] * 12)


def test_a_missed_promise_counts_as_wrong():
    apps = dict.fromkeys(APP_NAMES, app_scores())
    found = outcomes(probe("ours", n_missed=3), apps)
    assert [one["agrees"] for one in found] == [0, 0, 0, 0] + [1, 0] * 4
    assert [one["is_met"] for one in found] == [0] * 3 + [1] * 9
    assert {one["nats"] for one in found} == {2.0}


def test_a_shorter_prompt_has_answers_of_its_own():
    found = probe("ours-shorter")
    found = found._replace(served=[one._replace(share=0.3) for one in found.served])
    assert {one["nats"] for one in outcomes(found, dict.fromkeys(APP_NAMES, app_scores()))} == {0.5}


def test_a_request_has_the_widest_level_that_is_not_wider_than_what_it_used():
    assert setting_of(LEVELS, served(0, "GMail")) == (1.0, 1, 0)
    assert setting_of(LEVELS, served(0, "GMail", levels=(0.6, 0.2), share=0.3)) == (0.3, 1, 2)


def test_only_questions_without_answers_are_asked(tmp_path):
    asked = []

    def ask(wanted):
        asked.append({pair: [*rows] for pair, rows in wanted.items()})
        found = {pair: unanswered(4) for pair in wanted}
        for pair, rows in wanted.items():
            found[pair].choice[[*rows]], found[pair].nats[[*rows]] = 1, len(asked)
        return found

    kept = Kept(tmp_path)
    kept.scores("a", 4, {(0, 0): {0, 2}}, ask)
    found = Kept(tmp_path).scores("a", 4, {(0, 0): {2, 3}, (1, 0): {1}}, ask)
    assert kept.scores("a", 4, {(0, 0): {0, 2, 3}}, ask)[0, 0].nats[3] == 2
    assert asked == [{(0, 0): [0, 2]}, {(0, 0): [3], (1, 0): [1]}]
    assert found[0, 0].choice.tolist() == [1, -1, 1, 1]
    assert found[0, 0].nats[[0, 2, 3]].tolist() == [1, 1, 2]


def quality(by, alpha, agrees, system=None):
    n = len(agrees)
    return {
        "row": "quality", "system": system or by, "kind": "warm", "alpha": alpha, "rate": 1.0,
        "model": "packaged", "by": by, "is_met": [1] * n, "agrees": agrees, "right": [1] * n,
        "nats": [0.5] * n,
    }  # fmt: skip


ROWS = [
    {"row": "goodput", "system": "fifo-constant", "kind": "warm", "alpha": 0.0, "rate": 0.5,
     "possible": 1.0},
    {"row": "goodput", "system": "fifo-whole", "kind": "warm", "alpha": 0.0, "rate": None,
     "possible": 1 / 6},
    {"row": "goodput", "system": "ours", "kind": "warm", "alpha": 0.0, "rate": 1.0,
     "possible": 1.0},
    study.summary(probe("ours", n_missed=2)),
    study.summary(probe("ours", rate=2.0, n_missed=12)),
    study.summary(probe("fifo-constant", n_missed=6)),
    quality("ours", 0.0, [1, 1, 1, 1]),
    quality("ours", 0.25, [1, 1, 1, 0]),
    quality("LE", 0.0, [1, 0, 0, 0], "fifo-one-level"),
    quality("LE", 0.25, [1, 0, 0, 0], "fifo-one-level"),
]  # fmt: skip


def test_goodput_is_compared_with_the_constant_levels():
    lines = report.TABLES["deadlines-goodput"]([{"rows": ROWS}]).rows
    assert [line[3:] for line in lines] == [
        ["100 %", "0.50", "1.00×", ""], ["17 %", "none", "", ""], ["100 %", "1.00", "2.00×", ""],
    ]  # fmt: skip
    better = [{**ROWS[0], "system": "fifo-constant-0.7", "rate": 0.8}]
    lines = report.TABLES["deadlines-goodput"]([{"rows": [*ROWS, *better]}]).rows
    assert [line[5] for line in lines] == ["0.62×", "", "1.25×", "1.00×"]
    assert lines[-1][0] == f"{SYSTEMS['fifo-constant'].label}, 0.7 of it used"


def test_kept_promises_are_shown_by_app_and_by_rate():
    first, second = report.TABLES["deadlines-loaded"]([{"rows": ROWS}]).rows  # 2.00/s has only ours
    assert first[0].startswith("FIFO, best constant")
    assert first[4:] == ["50 %"] * 6 + ["50.0 %", "100.0 %", "50.0 %", ""]
    assert second[4:] == ["50 %"] * 2 + ["100 %"] * 4 + ["83.3 %", "100.0 %", "83.3 %", "8.3 %"]
    (alone,) = report.TABLES["deadlines-loaded"]([{"rows": ROWS[4:5]}]).rows
    assert alone[3] == "2.00"
    table = report.TABLES["deadlines-rates"]([{"rows": ROWS}])
    assert table.columns[3:] == ["1.00/s", "2.00/s"]
    assert sorted(line[3:] for line in table.rows) == [["50.0 %", ""], ["83.3 %", "0.0 %"]]


def test_quality_is_paired_and_mixes_are_pooled():
    lines = report.TABLES["deadlines-quality"]([{"rows": ROWS}]).rows
    theirs = [line for line in lines if line[1] == "LE, FIFO at one level"]
    assert [line[3:8] for line in theirs] == [
        ["0.00", "1.00", "4", "100.0 %", "25.0 %"], ["0.25", "1.00", "4", "100.0 %", "25.0 %"],
        ["all", "", "8", "100.0 %", "25.0 %"],
    ]  # fmt: skip
    assert [line[10].split(" ")[0] for line in theirs] == ["+75.0", "+50.0", "+62.5"]
    ours = [line for line in lines if line[1] == "ours"]
    assert [line[10] for line in ours] == ["", "", ""]


def test_all_others_are_compared_with_shorter_prompts_if_these_were_measured():
    rows = [*ROWS, quality("ours-shorter", 0.0, [1, 1, 1, 0])]
    table = report.TABLES["deadlines-quality"]([{"rows": rows}])
    assert table.columns[10] == "ours, shorter prompts − it: agrees"
    gains = {(line[1], line[3]): line[10].split(" ")[0] for line in table.rows}
    assert gains["ours", "0.00"] == "−25.0"
    assert gains["LE, FIFO at one level", "0.00"] == "+50.0"
    assert gains["ours, shorter prompts", "0.00"] == gains["ours", "0.25"] == ""


def test_shares_of_shortened_prompts_are_shown():
    found = probe("ours-shorter")
    found.served[0] = served(0, APP_NAMES[0], share=0.5)
    (line,) = report.TABLES["deadlines-shortened"]([{"rows": [*ROWS, study.summary(found)]}]).rows
    assert line[4:] == ["50 %, 75 % read"] + ["0 %, 100 % read"] * 5


def test_the_report_says_that_times_and_quality_are_of_different_models():
    half = {"row": "half", "kind": "warm", "alpha": 0.0, "rate": 1.0}
    said = report.report({"rows": [*ROWS, half]})
    assert "fifo-constant meets half of warm requests with alpha 0 at 1.00 requests/s." in said
    assert "(PFS) are left out; `--scratch` adds them" in said
    assert "XiaoAi: ARC-Challenge, as SCIQ is not at hand" in said
    alone = report.report({"rows": ROWS, "settings": {"data": False, "scratch": True}})
    assert "(PFS)" not in alone
    assert "the questions are packaged text" in alone
    assert "quality and times come from different models" in said
    assert all(f"{name}:" in said for name in report.TABLES if name != "deadlines-shortened")
    assert "LG2+CS (LLMLingua-2 + contextual sparsity) is left out" in said
    rows = [*ROWS, quality(COMPRESSED, 0.0, [1, 0, 0, 0], "fifo-one-level")]
    assert "with our compressor" in report.report({"rows": rows})


def test_pictures_are_drawn(tmp_path):
    plots.draw(ROWS, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "deadlines-rates.png", "deadlines-quality.png",
    }  # fmt: skip
