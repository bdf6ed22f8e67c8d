"""The comparison of ways to switch contexts: the cells that systems restore, and their budgets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from outputs import made
from soak import scale

from llmaas_eval.switching.cli import main
from llmaas_eval.switching.cost import Cost, measure_cost
from llmaas_eval.switching.engine import token_bytes
from llmaas_eval.switching.figures import FIGURES, Grid
from llmaas_eval.switching.groups import can_limit_memory, memory_group
from llmaas_eval.switching.report import details, most_contexts, ratio, summary
from llmaas_eval.switching.results import CallResult, RunResult
from llmaas_eval.switching.run import Job, run
from llmaas_eval.switching.steps import replay_of
from llmaas_eval.switching.synthetic import PIECE_TOKENS, SyntheticCells, rows_of
from llmaas_eval.switching.systems import SYSTEMS, BudgetTooSmallError, Setting
from llmaas_eval.traces import Settings, TraceCall, generate, write_trace
from llmaas_plugins import _native

MIB = 1 << 20
CONTEXTS, MAX_TOKENS = 12, 256
BUDGET = 22 * MIB  # some 5 MiB beside the slack; a context has 1 MiB of f16
COST = Cost(0.01, 0.001, 1e-7, 0.01, ())
OPTIONS = {"ours": {"codec": "lossless"}}
ROUNDED = {"vLLM-SQ"}
"""Systems that do not keep every bit."""

needs_groups = pytest.mark.skipif(
    not can_limit_memory(), reason="no writable cgroup v1 memory controller"
)


def trace(**changes):
    settings = {"contexts": CONTEXTS, "max_tokens": MAX_TOKENS, "pattern": "random"}
    return generate(Settings(**{**settings, **changes}))


@pytest.fixture(scope="module")
def n_token_bytes(reference_model):
    return token_bytes(reference_model)


@pytest.fixture
def setting(reference_model, n_token_bytes, tmp_path):
    return Setting(reference_model, n_token_bytes, tmp_path, BUDGET, CONTEXTS, MAX_TOKENS)


# -- what is replayed ---------------------------------------------------------------------------


def test_a_context_goes_on_where_its_last_call_ended():
    found = replay_of(trace().calls, MAX_TOKENS, 50)
    held = {step.context: step.after for step in found.fills}
    for step in found.steps:
        assert np.array_equal(step.before, held.get(step.context, []))
        n_new = step.n_prompt + step.n_reply
        kept = step.after[: len(step.after) - n_new]
        assert len(step.after) <= MAX_TOKENS
        assert np.array_equal(kept, step.before[len(step.before) - len(kept) :])
        assert step.slides == (len(step.before) + n_new > MAX_TOKENS)
        assert step.slides or len(kept) == len(step.before)
        held[step.context] = step.after


def test_a_window_that_slides_drops_the_older_half():
    calls = [TraceCall(float(i), 0, "chat", 80, 20) for i in range(3)]
    first, second, third = replay_of(calls, MAX_TOKENS).steps
    assert [len(step.after) for step in (first, second, third)] == [100, 200, 228]
    assert np.array_equal(third.after[:128], second.after[72:])
    assert (third.slides, third.window) == (True, 1)


def test_calls_before_the_measured_ones_leave_each_context_at_its_length():
    calls = trace().calls
    whole, last = replay_of(calls, MAX_TOKENS), replay_of(calls, MAX_TOKENS, 20)
    assert [step.context for step in last.steps] == [call.context for call in calls[-20:]]
    for step, same in zip(last.steps, whole.steps[-20:], strict=True):
        assert np.array_equal(step.before, same.before)
    before = [step.context for step in whole.steps[:-20]]
    order = sorted(set(before), key=lambda context: -before[::-1].index(context))
    assert [fill.context for fill in last.fills] == order


# -- the systems --------------------------------------------------------------------------------


def expected(cells, step, blob):
    """Return the cells of ``step.after``, as a blob like ``blob``."""
    n_tokens, whole = len(step.after), np.zeros_like(blob)
    rows = rows_of(cells.geometry, whole, n_tokens)
    for start in range(0, n_tokens, PIECE_TOKENS):
        n = min(PIECE_TOKENS, n_tokens - start)
        piece = cells.blob(step.context, step.window, start, n)
        for out, values in zip(rows, rows_of(cells.geometry, piece, n), strict=True):
            out[start : start + n] = values
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_after_a_switch_a_context_has_its_cells(name, setting):
    steps = replay_of(trace().calls, MAX_TOKENS, scale(30, 400))
    system = SYSTEMS[name](replace(setting, options=OPTIONS.get(name, {})))
    away = 0
    try:
        cells = SyntheticCells(system._cells.geometry)
        for step in [*steps.fills, *steps.steps]:
            entered = system.enter(step)
            assert sum(asdict(entered).values()) == len(step.before)
            away += len(step.before) - entered.n_resident
            system.grow(step, entered)
            check(cells, step, system.cells(step), is_rounded=name in ROUNDED)
            system.leave(step)
            system.background(step, 60.0)
    finally:
        system.close()
    assert away > 5 * MAX_TOKENS


def check(cells, step, blob, *, is_rounded):
    """Assert equal cells; cells may lie in any order, which the blob tells."""
    n_tokens = len(step.after)
    order = np.argsort(np.array(_native.blob_positions(blob)))
    for found, wanted in zip(
        rows_of(cells.geometry, blob, n_tokens), expected(cells, step, blob), strict=True
    ):
        if not is_rounded:
            assert np.array_equal(found[order], wanted)
            continue
        values, right = (np.ascontiguousarray(x).view(np.float16) for x in (found[order], wanted))
        bound = np.abs(right.astype(float)).max(axis=1, keepdims=True) / 127
        assert (np.abs(values.astype(float) - right) <= bound).all()


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_budget_without_room_for_a_context_is_refused(name, setting):
    with pytest.raises(BudgetTooSmallError, match="bytes"):
        SYSTEMS[name](replace(setting, budget=16 * MIB))


# -- processes and their memory -----------------------------------------------------------------


@pytest.mark.slow
@needs_groups
@pytest.mark.parametrize("name", ["vLLM-S", "ours"])
def test_a_system_stays_within_its_budget(name, setting, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(trace(), path)
    here = replace(setting, options=OPTIONS.get(name, {}))
    found = run(Job(name, path, here, COST, n_calls=10))
    assert found.failure is None
    assert len(found.calls) == 10
    assert found.limit_bytes == BUDGET
    assert 0 < found.peak_bytes <= BUDGET
    assert sum(call.n_disk for call in found.calls) > 0


@needs_groups
def test_what_takes_more_than_its_limit_is_killed():
    child = (
        "import sys, pathlib; from llmaas_eval.switching.groups import MemoryGroup\n"
        "group = MemoryGroup(pathlib.Path(sys.argv[1])); group.join()\n"
        "group.limit(group.used + (16 << 20)); bytearray(64 << 20).find(1)"
    )
    with memory_group() as group:
        done = subprocess.run([sys.executable, "-c", child, str(group.path)], check=False)
    assert done.returncode == -9


# -- figures ------------------------------------------------------------------------------------


def result(*latencies_s):
    none = dict.fromkeys(CallResult.__dataclass_fields__, 0)
    calls = [CallResult(**{**none, "is_switch": True, "enter_s": s}) for s in latencies_s]
    return RunResult(calls)


def test_a_summary_is_of_switches_only():
    run = result(0.001, 0.003)
    stayed = replace(run.calls[0], is_switch=False, enter_s=9.0)
    told = summary(replace(run, calls=[*run.calls, stayed]))
    assert (told.n, told.mean_ms, told.max_ms) == (2, 2.0, 3.0)


def test_a_ratio_is_of_means_over_the_same_calls():
    ours, theirs = result(1.0, 2.0, 3.0), result(2.0, 4.0, 6.0)
    assert ratio(theirs, ours) == (2.0, 2.0, 2.0)
    value, low, high = ratio(result(3.0, 1.0, 2.0), ours)
    assert low < value == 1.0 < high


def test_most_contexts_lie_between_two_numbers():
    means = {2: 0.0, 4: 5.0, 8: 25.0}
    assert most_contexts(means, 10.0) == 5.0
    assert most_contexts(means, 25.0) == 8.0
    assert most_contexts({4: 30.0}, 10.0) == 2.0
    assert most_contexts({}, 10.0) == 0.0


def test_evaluation_in_two_parts_costs_one_call_more():
    apart = COST.prompt_s(0, 100) + COST.prompt_s(100, 50)
    assert apart - COST.prompt_s(0, 150) == pytest.approx(COST.call_s)
    assert COST.prompt_s(100, 0) == 0.0


def test_the_cost_is_checked_on_ten_real_evaluations(reference_model):
    cost = measure_cost(reference_model, 64)
    assert len(cost.errors) == 10
    assert cost.reply_s > 0
    assert cost.prompt_s(0, 64) > 0
    assert all(error > -1 for error in cost.errors)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_cases_of_known_systems(name):
    figure = FIGURES[name]
    grid = Grid(figure.contexts, ["markov", "random"], list(SYSTEMS), 2048, 0.25, {})
    cases = list(figure.cases(grid))
    assert {case.system for case in cases} <= set(SYSTEMS)
    assert len(cases) == len({json.dumps(str(case)) for case in cases})
    assert all(case.budget_contexts >= case.contexts for case in cases)


def test_the_table_says_why_a_system_did_not_run():
    runs = {"ours": result(1.0, 2.0), "A": RunResult([], failure="does not fit")}
    runs["B"] = result(2.0, 4.0)
    table = details(runs, "ours")
    assert {len(row) for row in table.rows} == {len(table.columns)} == {len(table.align)}
    assert table.rows[1][:2] == ["A", "does not fit"]
    assert [table.rows[i][4] for i in (0, 2)] == ["1.00", "2.00 (2.00–2.00)"]


@pytest.mark.slow
def test_the_command_writes_calls_table_and_picture(reference_model, tmp_path):
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(asdict(COST)))
    arguments = ["--model", str(reference_model), "--folder", str(tmp_path), "--cost", str(cost)]
    arguments += ["--contexts", "3", "--patterns", "markov", "--systems", "LMK", "Swapping"]
    arguments += ["--calls", "6", "--hours", "12", "--max-tokens", "256", "--budget-share", "8"]
    assert main(["fig9", *arguments]) == 0
    found = json.loads((tmp_path / "fig9.json").read_text())
    assert [run["failure"] for run in found["runs"]] == [None] * 2
    assert all(len(run["calls"]) == 6 for run in found["runs"])
    assert "| Swapping |" in (tmp_path / "fig9.md").read_text()
    assert (found["settings"]["figure"], found["settings"]["disk_mb"]) == ("fig9", None)
    rows = made("switching-contexts", found, same_columns=False)
    assert [row[0] for row in rows] == ["LMK", "Swapping"]
    assert (tmp_path / "fig9.png").stat().st_size > 10_000
