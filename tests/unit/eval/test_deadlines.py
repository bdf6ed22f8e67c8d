"""The study of kept promises: what its table counts, and the study on a tiny model."""

from __future__ import annotations

import json

import pytest

from llmaas_eval.deadlines import cli, report
from llmaas_eval.deadlines.study import APPS, FASTEST, KINDS, Sample

HEADS = ["level", "kept", "called feasible", "prediction off by"]


def sample(app, phase, promised, measured, *, is_feasible=True, kind="cold", level=0.5):
    return Sample(app, kind, phase, promised, 10.0, measured, level, is_feasible)


def samples():
    """Return requests that are all in time and predicted right, but for two of the first app."""
    app = next(iter(APPS))
    for kind in KINDS:
        for phase in ("ttft", "tpot"):
            yield from (sample(FASTEST, phase, 1.0, 10.0, is_feasible=False, kind=kind),) * 20
            for other in APPS:
                yield sample(other, phase, 20.0, 10.0, kind=kind)
    yield sample(app, "ttft", 20.0, 25.0)  # missed without a flag
    yield sample(app, "ttft", 5.0, 8.0, is_feasible=False)  # impossible, and flagged


def output():
    return {"rows": [one._asdict() for one in samples()]}


def test_only_limits_that_the_fastest_setting_keeps_count():
    table = report.TABLES["deadlines-unloaded"]([output()])
    assert table.columns[3:7] == [f"first token: {HEADS[0]}", *HEADS[1:]]
    first, second, *_ = table.rows
    assert first[2:7] == ["cold", "0.5", "1 of 2", "2 of 2", "25 %"]
    assert second[2:7] == ["warm", "0.5", "1 of 1", "1 of 1", "0 %"]


def test_an_app_without_possible_limits_shows_how_many_were_flagged():
    rows = [
        one._asdict() | {"promised_ms": 5.0, "is_feasible": False}
        if one.app == "XiaoAi"
        else one._asdict()
        for one in samples()
    ]
    table = report.TABLES["deadlines-unloaded"]([{"rows": rows}])
    assert table.rows[-1][4:6] == ["impossible", "0 of 1"]


def test_the_totals_name_silent_misses():
    said = report.report(output())
    assert "25 of 26 limits are possible" in said
    assert "24 of these were kept, 25 were called feasible" in said
    assert "1 limits were missed without a flag" in said


@pytest.mark.slow
def test_the_study_on_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llmaas_plugins.elastic.latency.DIRECTORY", tmp_path / "latency")
    assert cli.main(["--quick", "-o", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "deadlines.json").read_text())
    assert len(found["rows"]) == 2 * (len(APPS) + 1) * len(KINDS) * 2
    whole = {row["level"] for row in found["rows"] if row["app"] == "Rewind"}
    assert 1.0 in whole  # the machine may have become busy after it was profiled
    assert "limits are possible" in capsys.readouterr().out
