"""The study of the memory budget, on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_eval.division import study, worker
from llmaas_eval.division.cli import main
from llmaas_eval.division.report import TABLES
from llmaas_eval.division.workloads import WORKLOADS
from llmaas_plugins.process_memory import SPARE_BYTES

NOISE_BYTES = 8 << 20
"""More than the peaks of two equal runs differ by."""


@pytest.mark.slow
@pytest.mark.parametrize("disk", [[], ["--disk"]])
def test_a_run_is_kept_and_shown(disk, tmp_path, capsys, monkeypatch):
    command = ["--out", str(tmp_path), "--quick", "--workloads", "mixed", "--json", *disk]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, fixed = document["rows"]
    assert (ours["share"], fixed["share"]) == (None, 0.0)
    assert ours["tokens"] == fixed["tokens"]  # the same work
    assert len(ours["turn_s"]) == len(fixed["turn_s"]) == 4 + 4 + 1
    assert ours["status"]["memory"]["budget"] == ours["budget"]
    assert ours["peak_bytes"] <= ours["budget"]
    # Nothing streams this model, and nothing else is left over.
    spare = study._ARENA + study._MORE + SPARE_BYTES
    assert ours["budget"] - ours["peak_bytes"] < spare + NOISE_BYTES
    monkeypatch.setattr(worker, "_run", None)
    assert main(command) == 0  # nothing is run again
    assert json.loads(capsys.readouterr().out)["rows"] == document["rows"]
    table = TABLES["memory-division"]([document])
    assert [row[1] for row in table.rows] == ["divided while running", "0 %"]


def test_divisions_are_compared_with_the_best_and_the_even_one():
    taken = {None: 10.0, 0.0: 30.0, 0.5: 14.0, 0.9: 9.0}
    row = {"workload": "mixed", "peak_bytes": 1 << 20, "budget": 2 << 20, "status": {}}
    rows = [
        row | {"share": share, "turn_s": [slower * s / 2, slower * s / 2]}
        for slower, order in ((1, 1), (3, -1), (2, 1))  # rounds, one of them in another order
        for share, s in [*taken.items()][::order]
    ]
    table = TABLES["memory-division"]([{"rows": rows}])
    assert [line[1:3] for line in table.rows] == [
        ["divided while running", "20.0"], ["0 %", "60.0"], ["50 %", "28.0"], ["90 %", "18.0"],
    ]  # fmt: skip
    assert [[cell.split()[0] for cell in line[3:5]] for line in table.rows] == [
        ["1.11", "1.40"], ["3.33", "0.47"], ["1.56", "1.00"], ["1.00", "1.56"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_use_contexts_that_exist(name):
    turns = WORKLOADS[name](np.random.default_rng(1), 5, 20)
    assert all(0 <= turn.context < 5 and turn.n_answer > 0 for turn in turns)
    again = WORKLOADS[name](np.random.default_rng(1), 5, 20)
    assert turns == again
