"""The study of one promise on whole sets: feasible settings, choices by halves, and tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.deadlines.alone import overhead, plots, report, study, variants
from llmaas_eval.deadlines.alone.answering import OURS, PAIRS, SEPARATE, WHOLE, Asked
from llmaas_eval.deadlines.alone.cells import Case, Cells
from llmaas_eval.deadlines.alone.choosing import Judge
from llmaas_eval.deadlines.alone.promises import (
    APART,
    apart,
    feasible,
    times_of,
    together,
    widest,
)
from llmaas_eval.deadlines.loaded.scoring import Item, Scores
from llmaas_plugins.elastic.latency import Curves, Latency, Machine
from llmaas_plugins.elastic.uniform import LEVELS

N = 8
NARROWEST = len(LEVELS) - 1


@pytest.fixture(scope="module")
def latency():
    """Return times of a machine on which a prompt token takes a level's ms, and an answer's ten.

    The prompt's part that no level narrows takes a tenth.
    """

    def curves(each, n_tokens, held):
        rows = tuple(tuple(each(level, n) for n in n_tokens) for level in LEVELS)
        middle = tuple((each(level, held),) for level in LEVELS)
        return Curves(
            n_tokens=n_tokens, ms=(rows,), spread_ms=(rows,), held=(held,), held_ms=(middle,)
        )

    return Latency(
        model="m",
        table="uniform",
        machine=Machine.this(),
        levels=LEVELS,
        threads=(1,),
        ttft=curves(lambda level, n: n * (0.1 + 0.9 * level), (1, 1001), 501),
        tpot=curves(lambda level, _: 10 * level, (1, 1001), 501),
    )


# -- promises ------------------------------------------------------------------------------------


def test_limits_are_kept_by_the_measured_times(latency):
    (promise,) = apart([0.5], [0.6])
    found = feasible(promise, times_of(latency, [100, 200]), PAIRS)
    assert min(prompt for prompt, _ in found) == LEVELS.index(0.4)  # 46 %; level 0.5 takes 55 %
    assert min(answer for _, answer in found) == LEVELS.index(0.6)
    (promise,) = apart([0.2], [1.0])
    assert feasible(promise, times_of(latency, [100, 200]), PAIRS) == []  # level 0.2 takes 28 %


def test_the_whole_model_keeps_all_of_its_time_and_nothing_less(latency):
    for promise in (*apart([1.0], [1.0]), *together([1.0])):
        assert WHOLE in feasible(promise, times_of(latency, [100]), PAIRS)
    for promise in (*apart([0.9, 1.0], [0.9]), *together([0.9])):
        assert WHOLE not in feasible(promise, times_of(latency, [100]), PAIRS)


def test_a_limit_of_the_whole_answer_lets_a_narrow_prompt_pay_for_a_wide_answer(latency):
    (promise,) = together([0.7])  # of 330 ms: 231; the first token is one of 24
    found = feasible(promise, times_of(latency, [100]), [(NARROWEST, 0), (0, NARROWEST), (0, 4)])
    assert found == [(0, NARROWEST)]  # 100 + 46; 28 + 230 is too much, as is 100 + 138
    (promise,) = together([0.79])
    assert (NARROWEST, 0) in feasible(promise, times_of(latency, [100]), PAIRS)


def test_a_setting_must_keep_the_promise_for_nearly_all_prompts(latency):
    (promise,) = together([0.6])  # a long prompt has less of its time in its answer
    settings = [(NARROWEST, 0)]
    assert feasible(promise, times_of(latency, [1000]), settings) == settings
    assert feasible(promise, times_of(latency, [10]), settings) == []
    assert feasible(promise, times_of(latency, [1000] * 19 + [10]), settings) == settings
    assert feasible(promise, times_of(latency, [1000] * 18 + [10] * 2), settings) == []


def test_the_widest_setting_is_a_feasible_one():
    assert widest([(1, 3), (3, 1), (2, 2), (3, 3)]) == (1, 3)
    assert widest([(2, 3), (3, 1), (3, 3)]) == (3, 1)
    assert widest([]) is None


# -- choices -------------------------------------------------------------------------------------


def scores(choices, nats=1.0):
    return Scores(np.array(choices, np.int32), np.full(len(choices), nats, np.float32))


def test_a_setting_is_judged_on_questions_that_did_not_choose_it():
    judge = Judge(scores([0] * 4), [0, 1, 0, 1])
    on_even, on_odd = scores([0, 1, 0, 1]), scores([1, 0, 1, 0])
    found = judge.chosen({(0, 0): on_even, (1, 1): on_odd}, [(0, 0), (1, 1)])
    assert found.settings == [(1, 1), (0, 0)]  # the odd questions chose for the even ones
    assert found.agrees.tolist() == [0, 0, 0, 0]
    assert found.right.tolist() == [0, 1, 0, 1]
    assert judge.chosen({}, []) is None


def test_likelier_answers_decide_between_settings_that_agree_equally_often():
    judge = Judge(scores([0] * 4), [0] * 4)
    by_pair = {(0, 0): scores([0] * 4, 2.0), (1, 1): scores([0] * 4, 1.0)}
    found = judge.chosen(by_pair, [*by_pair])
    assert found.settings == [(1, 1)] * 2
    assert found.nats.tolist() == [1.0] * 4


def test_a_random_setting_is_the_mean_and_the_best_one_knows_each_question():
    judge = Judge(scores([0] * 4), [0] * 4)
    by_pair = {(0, 0): scores([0, 1, 1, 1], 2.0), (1, 1): scores([1, 0, 1, 1], 1.0)}
    mean, best = judge.random(by_pair, [*by_pair]), judge.best(by_pair, [*by_pair])
    assert mean.agrees.tolist() == [0.5, 0.5, 0, 0]
    assert best.agrees.tolist() == [1, 1, 0, 0]
    assert (mean.nats[0], best.nats[0]) == (1.5, 1.0)


def test_a_random_setting_has_no_answers_below_30_percent(latency):
    items = [Item([1] * 100, [], [[1], [2]], 0) for _ in range(N)]
    ours = {pair: scores([1] * N) for pair in SEPARATE}
    ours |= {WHOLE: scores([0] * N), (NARROWEST, NARROWEST): scores([0] * N)}
    of = Asked("tiny", Path("tiny.gguf"), {"Rewind": items}, {}, [])
    rows = study.rows_of(of, {"Rewind": {OURS: ours}}, latency, apart([0.5], [0.5]))
    found = {row["by"]: row["agrees"] for row in rows if row["row"] == "promise"}
    assert found[study.RANDOM] == found[study.BEST] == [0.0] * N
    assert found[study.ONE_LEVEL] == [1.0] * N


# -- rows and tables -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs(latency):
    """Return an output in which only the level of the answer matters to ours, and PFS is wrong."""
    items = [Item([1] * 100, [], [[1], [2]], 0) for _ in range(N)]
    ours = {pair: scores([0] * (N - pair[1]) + [1] * pair[1], 1 + pair[1]) for pair in PAIRS}
    theirs = {(i, i): scores([1] * N, 5.0) for i in range(len(LEVELS))}
    sets = ("Rewind", "XiaoAi")
    of = Asked("tiny", Path("tiny.gguf"), dict.fromkeys(sets, items), {}, ["PFS"])
    found = {name: {OURS: ours, "PFS": theirs} for name in sets}
    promises = [*apart(LEVELS, LEVELS[:6]), *together(LEVELS)]
    return [{"rows": [*study.rows_of(of, found, latency, promises)]}]


def test_an_impossible_promise_is_replaced_by_the_next_wider_one(outputs):
    cells = Cells(outputs, "tiny")
    assert cells.values(Case("XiaoAi", APART, 0.2, 0.5), OURS) is None
    assert cells.app_cases()["XiaoAi"] == ("XiaoAi", APART, 0.3, 0.5)
    assert cells.app_cases()["Rewind"] == ("Rewind", APART, 1.0, 1.0)


def test_methods_are_compared_on_the_same_questions(outputs):
    rows = report.TABLES["alone-apps"](outputs).rows
    found = {
        (row[1], row[3]): row[4:] for row in rows if row[1] in {"Rewind", "XiaoAi", "2 of 2 apps"}
    }
    assert found["Rewind", OURS] == ["100 % / 100 %", "100.0 %", "100.0 %", "1.000", "", "", ""]
    level = f"20 % / {LEVELS[5]:.0%}".replace("%", " %").replace("  ", " ")
    assert found["XiaoAi", study.WIDEST][0] == level
    assert found["XiaoAi", OURS][1] == "37.5 %"  # 3 of 8 at the level 0.5
    assert found["2 of 2 apps", OURS][1] == "68.8 %"
    assert found["2 of 2 apps", "PFS"][4].startswith("+68.8 (")
    assert found["2 of 2 apps", "PFS"][6].startswith("−1.500 (")


def test_tables_say_how_many_apps_a_method_can_serve(outputs):
    rows = [row for row in outputs[0]["rows"] if row["row"] == "promise"]
    some = [
        {name: row[name] for name in row if name not in {"agrees", "right", "nats"}}
        if (row["set"], row["by"]) == ("XiaoAi", "PFS")
        else row
        for row in rows
    ]
    found = [{"rows": some}]
    by = {tuple(row[1:4:2]): row[5:] for row in report.TABLES["alone-apps"](found).rows}
    assert by["XiaoAi", "PFS"][0] == "impossible"
    assert by["1 of 2 apps", "PFS"][0] == by["Rewind", "PFS"][0] == "0.0 %"
    (line, *_) = report.TABLES["alone-answer-time"](found).rows
    assert line[3] == "2"
    assert line[-1].endswith("), 1 of 2 apps")
    assert line[-2].endswith(")")
    grid = report.TABLES["alone-grid"](found).rows
    assert grid[0][-1].endswith("), 1 of 2 apps")


def test_the_grid_says_where_ours_is_better_and_what_is_impossible(outputs):
    table = report.TABLES["alone-grid"](outputs)
    assert table.columns[3:] == [f"{round(100 * level)} %" for level in LEVELS[:6]]
    by = {(row[1], row[2]): row[3:] for row in table.rows}
    assert by["agrees", "20 %"] == ["impossible"] * 6
    assert [cell.split(" ")[0] for cell in by["agrees", "30 %"]] == [
        "+100.0", "+87.5", "+75.0", "+62.5", "+50.0", "+37.5",
    ]  # fmt: skip


def test_ways_to_choose_are_compared_with_a_random_setting(outputs):
    table = report.TABLES["alone-ways"](outputs)
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["promise"] == "100 % / 100 %"
    promises = [row[1] for row in table.rows]
    assert promises[-2:] == ["30 % / 60 %", "30 % / 50 %"]  # in place of 20 %
    assert len(promises) == 6
    assert first["apps"] == "2"
    assert (first[study.BEST], first[OURS], first[study.WIDEST]) == ("100.0 %",) * 3
    assert float(first[study.RANDOM].removesuffix(" %")) < 65


def test_whole_answers_have_limits_too(outputs):
    table = report.TABLES["alone-answer-time"](outputs)
    assert table.columns[3:] == ["apps", "ours", "ours − ours, one level", "ours − PFS"]
    by = {(row[1], row[2]): row[4:] for row in table.rows}
    assert len(by) == 3 * len(LEVELS)
    assert by["agrees", "20 %"] == ["impossible"] * 3
    assert by["agrees", "100 %"][0] == "100.0 %"
    assert by["agrees", "100 %"][2].startswith("+100.0 (")
    over_one_level = by["agrees", "60 %"][1].split(" ")[0]
    assert float(over_one_level) > 0  # a narrow prompt pays for a wide answer


def test_the_report_says_that_times_and_quality_are_of_different_models(outputs):
    said = report.report(outputs[0])
    assert "quality and times come from different models" in said
    names = ("alone-apps", "alone-grid", "alone-answer-time", "alone-ways")
    assert all(f"{name}:" in said for name in names)


def test_pictures_are_drawn(outputs, tmp_path):
    plots.draw(outputs[0]["rows"], tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 5_000}
    assert names == {f"alone-{name}-tiny.png" for name in ("apps", "grid", "settings")}


# -- variants ------------------------------------------------------------------------------------


def test_variants_are_asked_only_for_the_widest_settings_that_keep_each_promise(latency):
    items = [Item([1] * 100, [], [[1], [2]], 0) for _ in range(N)]
    found = variants.settings(dict.fromkeys(("Rewind", "GMail", "XiaoAi"), items), latency)
    assert found["Rewind"] == {WHOLE}
    assert found["GMail"] == {WHOLE, (LEVELS.index(0.7), 1), (LEVELS.index(0.7),) * 2}
    assert (NARROWEST, LEVELS.index(0.5)) in found["XiaoAi"]  # for 30 % of the first token's time


def test_variants_are_compared_with_the_first_model(outputs):
    worse = [
        {
            **row,
            "model": "tiny, Q4_0",
            "nats": [one + 0.25 for one in row.get("nats", ())],
            "has_all_settings": False,
        }
        for row in outputs[0]["rows"]
        if row["row"] == "promise"
    ]
    table = report.TABLES["alone-variants"]([*outputs, {"rows": worse}])
    found = {(row[0], row[1]): row[2:] for row in table.rows}
    assert found["tiny, Q4_0", study.WIDEST][-1].startswith("+0.250 (")
    assert found["tiny", study.WIDEST][-1] == found["tiny", "PFS"][-1] == ""
    assert found["tiny", "PFS"][0] == "2"
    assert found["tiny", "PFS"][4].startswith("+68.8 (")
    for row in worse:  # the same number of questions, about another app
        row["set"] = {"Rewind": "GMail"}.get(row["set"], row["set"])
    (*_, last) = report.TABLES["alone-variants"]([*outputs, {"rows": worse}]).rows
    assert last[-1] == ""
    for row in worse:
        row["set"] = {"GMail": "Rewind"}.get(row["set"], row["set"])
    ways = report.TABLES["alone-ways"]([*outputs, {"rows": worse}])
    assert {row[0] for row in ways.rows} == {"tiny"}


def test_words_are_compared_with_random_ones_at_the_same_share():
    about = {"row": "share", "model": "tiny", "set": "Rewind", "right": [0, 0], "nats": [1.0, 1.0]}
    rows = [
        {**about, "by": "whole prompt", "share": 1.0, "kept": 1.0, "agrees": [1, 1]},
        {**about, "by": "random", "share": 0.4, "kept": 0.38, "agrees": [0, 0]},
        {**about, "by": "attention", "share": 0.4, "kept": 0.4, "agrees": [1, 0]},
    ]
    whole, random, ours = report.TABLES["alone-shares"]([{"rows": rows}]).rows
    assert whole[:4] == ["whole prompt", "100 %", "100 %", "100.0 %"]
    assert random[2:4] == ["38 %", "0.0 %"]
    assert random[-3:] == whole[-3:] == ["", "", ""]
    assert ours[-3].startswith("+50.0 (")


# -- memory and switching ------------------------------------------------------------------------


def test_memory_is_compared_with_the_whole_model_alone():
    peaks = {overhead.STOCK: 100, overhead.WITH_LEVELS: 101, overhead.SWAPPED: 110,
             overhead.ALL_KEPT: 500}  # fmt: skip
    rows = [{"row": "memory", "way": way, "bytes": [mib << 20] * 3} for way, mib in peaks.items()]
    found = {row[0]: row[1:] for row in report.TABLES["alone-memory"]([{"rows": rows}]).rows}
    assert found[overhead.WITH_LEVELS] == ["101", "1.010 (1.010–1.010)"]
    assert found[overhead.ALL_KEPT] == ["500", "5.000 (5.000–5.000)"]


def test_switches_to_a_level_are_compared_by_way():
    about = {"row": "switch", "level": 0.6}
    rows = [
        {**about, "way": overhead.SWITCHED, "seconds": [4e-4] * 3},
        {**about, "way": overhead.FROM_DISK, "seconds": [0.2] * 3, "file_bytes": 60 << 20},
    ]
    (row,) = report.TABLES["alone-switching"]([{"rows": rows}]).rows
    assert row == ["60 %", "60", "0.40 ms (0.40–0.40)", "", "", "200.0 ms (200.0–200.0)", ""]
