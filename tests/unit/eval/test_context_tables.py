"""Tables of stored contexts: the committed ones come back from rows that have their values.

Each row has one text, conversation or call, so an interval is a point. Cells with intervals are
compared by their form.
"""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
from outputs import committed_rows, figure, form, forms, made, numbers

from llmaas_eval.switching.figures import ABLATIONS, Case
from llmaas_eval.switching.results import CallResult, RunResult
from llmaas_eval.tolerance import report as tolerance
from llmaas_eval.tolerance.arms import Arm
from llmaas_eval.window.study import WAYS

# -- switching ------------------------------------------------------------------------------------


def replay(latencies_ms, mib=0.0):
    """Return the replay of a call for each latency, which all switch contexts."""
    none = dict.fromkeys(CallResult.__dataclass_fields__, 0) | {"is_switch": True}
    none["read_bytes"] = none["later_written_bytes"] = int(mib * (1 << 20))
    return RunResult([CallResult(**none | {"enter_s": ms / 1e3}) for ms in latencies_ms])


def switching(figure, runs, disk_mb=None):
    settings = {"figure": figure, "model": "m.gguf", "n_calls": 1, "disk_mb": disk_mb}
    rows = [{"case": asdict(case), **run.to_json()} for case, run in runs]
    return {"settings": settings, "runs": rows}


def test_systems_by_the_speed_of_the_disk():
    systems = [("ours", [4.0, 6.0], 2.4), ("LMK", [900.0, 1100.0], 0.0)]
    failed = (Case("vLLM-S", "vLLM-S"), RunResult([], failure="does not fit: 1 byte"))
    runs = [(Case(name, name), replay(ms, mib)) for name, ms, mib in systems]
    slow = [(case, replay([4 * call.enter_s * 1e3 for call in run.calls])) for case, run in runs]
    found = made(
        "switching", switching("one", [*slow, failed], 100.0), switching("one", [*runs, failed])
    )
    assert found[0][1:5] == ["20.00", "20.00", "23.92", "1.00"]
    assert found[0][5:] == ["5.00", "5.00", "5.98", "1.00", "2.4"]
    assert found[1][4:6] == ["200 (183–225)", "1000.00"]
    assert found[1][-1] == "0"
    assert found[2] == ["vLLM-S", "does not fit", "", "", "", "does not fit", "", "", "", ""]
    assert form(found[1][4]) == form(committed_rows("switching")[-1][4])


def test_systems_by_the_number_of_contexts():
    rows = committed_rows("switching-contexts")
    runs = [
        (Case(name, name, contexts=n), replay(numbers(cell)))
        for name, *cells in rows
        for n, cell in zip((2, 4, 6, 8, 12, 16), cells, strict=True)
    ]
    assert made("switching-contexts", switching("fig9", runs)) == rows


def test_systems_by_the_pattern_of_calls():
    rows = committed_rows("switching-patterns")
    names = ("ours", "vLLM-SQ in cells", "vLLM-SQ", "Swapping")

    def figure(name, settings, some):
        runs = [
            (Case(system, system, **changes), outcome(cell))
            for changes, row in zip(settings, some, strict=True)
            for system, cell in zip(names, row[1:], strict=True)
            if cell
        ]
        fewer = [(Case("ours", "ours", contexts=4), replay([1.0]))]
        return switching(name, [*fewer, *runs])

    def outcome(cell):
        fits = cell != "does not fit"
        return replay(numbers(cell)) if fits else RunResult([], failure="does not fit: 9 bytes")

    outputs = [
        figure("one", [{"pattern": "random"}, {"pattern": "gaussian"}], rows[:2]),
        figure("fig15", [{"rate_minutes": m} for m in (0.05, 0.2, 1.0, 5.0, 15.0)], rows[2:7]),
        figure("fig11", [{"max_tokens": n} for n in (256, 512, 1024)], rows[7:10]),
        figure("fig10", [{"budget_share": s} for s in (0.125, 0.25, 0.375)], rows[10:]),
    ]
    assert made("switching-patterns", *outputs) == rows


def test_techniques():
    rows = committed_rows("switching-techniques")
    runs = [
        (Case("ours", label), replay([numbers(row[2])[0] + gap for gap in (-1.0, 0.0, 2.0)], 3.6))
        for label, row in zip(ABLATIONS, rows, strict=True)
    ]
    found = made("switching-techniques", switching("fig13", runs))
    assert [row[0] for row in found] == [row[0] for row in rows]
    assert forms(found) == forms(rows)
    assert found[0] == ["ours", "5.33", "5.00", "1.00", "3.6", "3.6"]


# -- tolerance ------------------------------------------------------------------------------------

RIVALS = tolerance._RIVALS
RECALLED = tolerance._RECALLED


def kept(arm, task, **values):
    """Return the row of a text that was kept in a way."""
    names = ("kl", "kl_first", "top1_first", "surprise", "attention_error", "right", "nats")
    other = dict.fromkeys(names, 0.0) | {"bits": arm.mean, "share": 0.2, "text": 0}
    return {"arm": arm.name, "mean": arm.mean, "task": task, **other, **values}


def test_rivals():
    expected, rows = committed_rows("tolerance-rivals"), []
    for arm, row in zip(RIVALS, expected, strict=True):
        bits, share, kl, _, first, top1, error = (numbers(cell) or [0.0] for cell in row[1:])
        values = {"bits": bits[0], "share": share[0] / 100, "kl": kl[0] / 1e4}
        values |= {"kl_first": first[0] / 1e4, "top1_first": top1[0] / 100}
        rows.append(kept(arm, "news", **values, attention_error=error[0] / 100))
    found = made("tolerance-rivals", figure("fig12", rows[::-1]))
    difference = 4
    for one, other in zip(found, expected, strict=True):
        assert form(one.pop(difference)) == form(other.pop(difference))
        assert one == other


def test_tasks():
    expected, rows = committed_rows("tolerance-tasks"), []
    arms = (tolerance._OURS, Arm("static", 4), Arm("int8"))
    for task, *cells in expected[:-1]:
        for arm, cell in zip(arms, (*cells[:2], "0"), strict=True):
            rows.append(kept(arm, task, kl=numbers(cell)[0] / 1e4, surprise=0.001))
    found = made("tolerance-tasks", figure("fig12", rows))
    assert [row[:3] for row in found[:-1]] == [row[:3] for row in expected[:-1]]
    assert forms(found) == forms(expected)
    assert found[-1][0] == "all"


def test_a_curve():
    expected, rows = committed_rows("tolerance-curve"), []
    names = ("static", "ours", "recency", "random", "layers")
    for bits, share, *cells in expected:
        for name, cell in zip(names, cells[:-1], strict=True):
            levels = () if name == "static" else tolerance.ALL
            values = {"share": numbers(share)[0] / 100, "kl": numbers(cell)[0] / 1e4}
            rows.append(kept(Arm(name, float(bits), levels), "news", **values))
    found = made("tolerance-curve", figure("curve", rows))
    assert [row[:-1] for row in found] == [row[:-1] for row in expected]
    assert [form(row[-1]) for row in found] == [form(row[-1]) for row in expected]


def test_recall():
    expected, rows = committed_rows("tolerance-recall"), []
    for arm, row in zip(RECALLED, expected, strict=True):
        for task, cell in (("alike", row[3]), ("facts", row[6])):
            share = numbers(row[2])[0] / 100
            rows.append(kept(arm, task, share=share, right=numbers(cell)[0] / 100))
    found = made("tolerance-recall", figure("recall", rows[::-1]))
    for row in expected:
        row[0] = "static" if row[0] == "**static**" else row[0]  # stressed by hand
    assert forms(found) == forms(expected)
    for differs in (8, 7, 5, 4):
        for row in (*found, *expected):
            row.pop(differs)
    assert found == expected


@pytest.mark.parametrize("name", ["fig6b", "fig12", "curve", "recall"])
def test_a_report_shows_the_tables_that_are_kept(name):
    arms = {"fig12": RIVALS, "recall": RECALLED}.get(name, (Arm("static", 4), tolerance._OURS))
    if name == "curve":
        names = ("ours", "recency", "random", "layers")
        arms = [Arm("static", 4), *(Arm(rival, 4, tolerance.ALL) for rival in names)]
    document = figure(name, [kept(arm, "news") for arm in arms])
    tables = {"fig12": "tolerance-rivals", "curve": "tolerance-curve", "recall": "tolerance-recall"}
    text = tolerance.report(document)
    if name in tables:
        for row in made(tables[name], document, same_columns=name != "recall"):
            assert f"| {row[0]} | {row[1]} |" in text


# -- window ---------------------------------------------------------------------------------------


def test_windows():
    outputs = []
    for window, texts, *cells, evaluated in committed_rows("window"):
        again, moved = numbers(evaluated)
        rows = [{"name": WAYS[0].name, "against_first": [1.0] * 3, "evaluated": again}]
        for way, cell in zip(WAYS[1:], cells, strict=True):
            if cell:
                low, high = (float(each) for each in re.findall(r"[\d.]+", cell)[1:])
                against = [numbers(cell)[0], low, high]
                rows.append({"name": way.name, "against_first": against, "evaluated": moved})
        rows = [row | {"perplexity": 9.0} for row in rows]
        sizes = {"window": int(window.replace(",", "")), "tokens": 900, "texts": int(texts)}
        outputs.append(sizes | {"rows": rows})
    assert made("window", *outputs[::-1]) == committed_rows("window")
