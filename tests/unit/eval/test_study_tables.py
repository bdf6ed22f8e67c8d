"""Tables of the studies: the committed ones come back from rows that have their values.

Each row has one text, conversation or call, so an interval is a point. Cells with intervals are
compared by their form.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import numpy as np
import pytest
from outputs import committed_rows, made

from llmaas_eval.elastic.readings import Reading
from llmaas_eval.elastic.rows import FULL, INTERPOLATED, as_json
from llmaas_eval.elastic.rows import Row as ElasticRow
from llmaas_eval.knn import report as knn
from llmaas_eval.knn.scoring import Row as KnnRow
from llmaas_eval.sparse.report import report as sparse_report
from llmaas_eval.stats import Surprise
from llmaas_eval.switching.figures import ABLATIONS, Case
from llmaas_eval.switching.results import CallResult, RunResult
from llmaas_eval.tolerance import report as tolerance
from llmaas_eval.tolerance.arms import Arm
from llmaas_eval.window.study import WAYS


def numbers(cell):
    """Return a cell's numbers."""
    cell = cell.replace("−", "-").replace(",", "")
    return [float(each) for each in re.findall(r"[-+]?\d[\d.]*", cell)]


def form(cell):
    """Return a cell with each number replaced by how many digits follow its point."""
    return re.sub(r"[+−]?\d[\d,]*(?:\.(\d+))?", lambda found: f"#{len(found[1] or '')}", cell)


def forms(rows):
    return [[form(cell) for cell in row] for row in rows]


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


def figure(name, rows):
    return {"settings": {"figure": name}, "rows": rows}


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


# -- knn ------------------------------------------------------------------------------------------


def scored(user, method, perplexity, n_pairs=0, n_history=1000):
    """Return a row of one conversation of ten targets."""
    surprise = Surprise(np.array([10 * math.log(perplexity)]), np.array([10]))
    return KnnRow(user, method, n_history, n_pairs, None, surprise)


def study(name, rows):
    return figure(name, [row if isinstance(row, dict) else knn.as_json(row) for row in rows])


def test_users():
    rows = []
    for label, *counts, known in committed_rows("knn-users"):
        user, _, name = label[:-1].partition(" (")
        values = dict(zip(("n_train", "n_test", "n_removed"), map(int, counts), strict=True))
        rows.append({"user": user, "set": name, **values, "known": numbers(known)[0] / 100})
    assert made("knn-users", figure("users", rows)) == committed_rows("knn-users")


METHODS = ["pure", "full", "random", "merging", "offline", "stream", "online"]
METHODS += ["offline, top", "online, top"]


def test_perplexities():
    rows = [
        scored(user, method, numbers(cell)[0], n_history=int(numbers(n)[0]))
        for user, n, *cells in committed_rows("knn-perplexity")
        for method, cell in zip(METHODS, cells, strict=True)
    ]
    assert made("knn-perplexity", study("table2", rows)) == committed_rows("knn-perplexity")
    few = [row for row in rows if row.method in {"pure", "random"}]
    assert made("knn-perplexity", study("table2", few), same_columns=False)[0] == [
        *("topic-health", "61,647", "87.8", "47.9")
    ]


def test_means():
    expected, rows = committed_rows("knn-means"), []
    for user in "abcd":
        rows += [scored(user, "pure", 100.0), scored(user, "random", 55.0, 300)]
        for method, share, to_pure, *_ in expected:
            value, n_pairs = 100 + numbers(to_pure)[0], 10 * numbers(share)[0]
            rows.append(scored(user, method.strip("*"), value, int(n_pairs)))
    found = made("knn-means", study("table2", rows))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert forms(found) == forms(expected)
    assert found[1][2] == "**−49.4 %** (−49.4 to −49.4)"


def test_shares_of_kept_pairs():
    expected, rows = committed_rows("knn-kept"), [scored("a", "pure", 100.0)]
    for method, *cells in expected:
        for share, cell in zip((0.05, 0.1, 0.2, 0.3, 0.5, 0.75), cells, strict=True):
            change, *kept = numbers(cell)
            n_pairs = int(10 * (kept[0] if kept else 100 * share))
            rows.append(scored("a", f"{method} {share:g}", 100 + change, n_pairs))
    rows.append(scored("a", "full", 50.0, 1000))
    assert made("knn-kept", study("fig9", rows)) == expected


def test_changing_interests():
    expected, rows = committed_rows("knn-drift"), []
    users = ["turns", "turns on B and C mixed", "topics", "topics on B and C mixed"]
    for user, row in zip(users, expected, strict=True):
        pure = numbers(row[2])[0]
        rows.append(scored(user, "pure", pure))
        for method, cell in zip(("full", "random", "offline", "stream"), row[3:7], strict=True):
            rows.append(scored(user, method, pure * (1 + numbers(cell)[0] / 100)))
    found = made("knn-drift", study("table3", rows))
    assert [row[:-1] for row in found] == [row[:-1] for row in expected]
    assert forms(found) == forms(expected)


def test_harm():
    expected, rows = committed_rows("knn-harm"), []
    texts = {"novels": " on novels", "WikiText-2": " on wikitext"}
    texts |= {"another user's chats": " on a stranger's", "own chats": ""}
    for name, *cells in expected[::-1]:
        for n_prompt, cell in zip((0, 16, 32, 64, 128), cells, strict=True):
            for user in ("topic-health", "turns-travel"):
                text = f"{user}{texts[name]}" + (f" after {n_prompt}" if n_prompt else "")
                rows.append(scored(text, "pure", 100.0))
                rows.append(scored(text, "offline", 100 + numbers(cell)[0]))
    found = made("knn-harm", study("harm", rows))
    assert forms(found) == forms(expected)
    values = [[numbers(cell)[0] for cell in row[1:]] for row in found]
    assert values == [[numbers(cell)[0] for cell in row[1:]] for row in expected]


def test_approximations():
    expected, rows = committed_rows("knn-approximation"), []
    thresholds = (0.99, 0.95, 0.9, 0.7)
    for user in "ab":
        rows += [scored(user, "pure", 100.0), scored(user, "exact", 50.0)]
        for n_dims, threshold, row in zip((32, 64, 128, 256), thresholds, expected, strict=True):
            value = 50 * (1 + (numbers(row[2]) or [0])[0] / 100)
            own = knn.as_json(scored(user, f"{n_dims} dimensions", value))
            rows.append(own | {"recall": numbers(row[1])[0] / 100})
            value = 50 * (1 + numbers(row[6])[0] / 100)
            own = knn.as_json(scored(user, f"unless MaxProb is {threshold}", value))
            rows.append(own | {"saved": numbers(row[5])[0] / 100})
    found = made("knn-approximation", study("shipped", rows))
    assert [row[:6] for row in found] == [row[:6] for row in expected]
    assert forms(found) == forms(expected)


def test_generated_text():
    names = ["alone, temperature 0.8", "with the datastore, temperature 0.8", "cloud model"]
    names += ["alone, greedy", "with the datastore, greedy"]
    figures = ("distinct_1", "distinct_2", "repeated", "copied")
    rows = [
        {"user": "topic-health", "text": text}
        | {name: numbers(cell)[0] for name, cell in zip(figures, row[1:], strict=True)}
        for text, row in zip(names, committed_rows("knn-generated"), strict=True)
    ]
    assert made("knn-generated", figure("generated", rows[::-1])) == committed_rows("knn-generated")


# -- sparse ---------------------------------------------------------------------------------------


def sparse():
    """Return the study's output with the values of the committed tables."""
    found = {"perplexity": [], "hits": [], "reads": [], "engine": []}
    found |= {name: [] for name in ("likeness", "selection", "spread")}
    ways = [("threshold", 64), ("top-k", 64), ("threshold", 0), ("top-k", 0)]
    for (way, dense), row in zip(ways, committed_rows("sparse-perplexity"), strict=True):
        for sparsity, cell in zip((0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), row[1:], strict=True):
            about = {"selection": way, "dense": dense, "sparsity": sparsity}
            found["perplexity"].append(about | {"perplexity": float(cell)})
    for sparsity, task in ((0.5, "chats"), (0.5, "articles"), (0.6, "chats")):
        is_shown = (sparsity, task) == (0.5, "chats")
        about = {"sparsity": sparsity, "task": task}
        found["hits"] += [about | hit | {"rate": is_shown * hit["rate"]} for hit in hits()]
        found["reads"] += [about | read for read in reads()]
    return found


def hits():
    families = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    for family, row in zip(families, committed_rows("sparse-hits"), strict=True):
        for size, cell in zip((0.2, 0.3, 0.4, 0.5), row[1:5], strict=True):
            rates = [*numbers(cell), float(row[5])]
            policies = ("LFU, context", "static", "Belady")
            for policy, rate in zip(policies, rates, strict=True):
                yield {"family": family, "policy": policy, "size": size, "rate": rate / 100}


def reads():
    lfu = "LFU, context"
    ways = [("static", 1, False, "busiest"), (lfu, 1, False, "busiest"), (lfu, 1, False, "index")]
    ways += [(lfu, 2, False, "busiest"), (lfu, 4, False, "busiest"), (lfu, 4, True, "busiest")]
    ways.append(("static", 1, True, "busiest"))
    for way, row in zip(ways, committed_rows("sparse-reads")[1:], strict=True):
        about = dict(zip(("policy", "layers", "ahead", "order"), way, strict=True))
        for size, cell in zip((0.2, 0.3, 0.4, 0.5), row[1:], strict=True):
            total, on_demand = (*numbers(cell), numbers(cell)[0])[:2]
            for family, part in (("ffn_up", 0.25), ("ffn_down", 0.75)):
                costs = {"ahead_us": 1000 * part * (total - on_demand)}
                costs["on_demand_us"] = 1000 * part * on_demand
                yield about | {"family": family, "size": size, **costs}


@pytest.mark.parametrize("name", ["sparse-perplexity", "sparse-hits", "sparse-reads"])
def test_sparse_tokens(name):
    expected = committed_rows(name)
    if name == "sparse-reads":
        expected[0][1] = "259"  # 0.8 of 324.36; the docs have 260
    assert made(name, sparse()) == expected


def test_the_sparse_report_shows_the_tables_that_are_kept():
    text = sparse_report(sparse())
    assert "| LFU, four layers side by side | 590 | 520 | 448 | 372 |" in text


# -- elastic --------------------------------------------------------------------------------------


LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
ELASTIC = ["searched", "uniform", "first order", "fluctuation", "LLM-Pruner"]
ELASTIC += ["LLM-Pruner, own layers", "magnitude", "random", f"ShortGPT{INTERPOLATED}"]
ELASTIC += ["ShortGPT", f"LaCo{INTERPOLATED}"]


def measured(method, level, ratio, share=None, **agreement):
    """Return a row whose perplexity is ``ratio`` times the whole model's, on one window."""
    values = {"kl": 0.0, "same": 1.0} | agreement
    nats = [2.0 + math.log(ratio)]
    reading = Reading(*(np.array(each, float) for each in (nats, [values["kl"]], [values["same"]])))
    return ElasticRow(method, level, level if share is None else share, reading)


def elastic(**parts):
    full = measured(FULL, 1.0, 1.0)
    names = ("levels", "layers", "calibration", "types", "continued")
    return as_json({name: [full, *parts[name]] if name in parts else [] for name in names})


def test_methods_by_level():
    expected, rows = committed_rows("elastic-perplexity"), []
    for method, row in zip(ELASTIC, expected, strict=True):
        for i, (level, cell) in enumerate(zip(LEVELS, row[1:-1], strict=True)):
            is_whole = cell.startswith("(")
            share = 1.0 - i / 8 if method == "ShortGPT" else None
            rows.append(measured(method, level, 1.0 if is_whole else numbers(cell)[0], share))
    rows.append(measured("random, best", 0.9, 1.1))
    found = made("elastic-perplexity", elastic(levels=rows[::-1]))
    assert [row[:-1] for row in found] == [row[:-1] for row in expected]
    assert forms(found) == forms(expected)
    assert [row[-1][-4:] for row in found] == [row[-1][-4:] for row in expected]


def test_agreement_by_level():
    same, kl = (committed_rows("elastic-agreement")[i : i + 2] for i in (0, 2))
    rows = [
        measured(method, level, 1.1, same=numbers(one)[0] / 100, kl=float(other))
        for method, *cells in zip(("searched", "uniform"), same, kl, strict=True)
        for level, one, other in zip(LEVELS, cells[0][1:], cells[1][1:], strict=True)
    ]
    assert made("elastic-agreement", elastic(levels=rows)) == committed_rows("elastic-agreement")


@pytest.mark.parametrize("part", ["calibration", "types"])
def test_ratios_by_level(part):
    expected = committed_rows(f"elastic-{part}")
    levels = LEVELS if part == "calibration" else (1.0, *LEVELS)
    rows = [
        measured(method, level, float(cell))
        for method, *cells in expected
        for level, cell in zip(levels, cells, strict=True)
    ]
    assert made(f"elastic-{part}", elastic(**{part: rows})) == expected


def test_contexts_that_change_their_level():
    expected, levels = committed_rows("elastic-continued"), (1.0, 0.8, 0.5, 0.3)
    rows = [
        measured(f"from {before:.0%}", level, float(cell))
        for before, row in zip(levels, expected, strict=True)
        for level, cell in zip(levels, row[1:], strict=True)
    ]
    assert made("elastic-continued", elastic(continued=rows)) == expected


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
