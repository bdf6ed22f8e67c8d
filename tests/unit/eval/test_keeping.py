"""Outputs of studies that become files in ``eval/results``, and so tables of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outputs import committed_rows, made

from llmaas_eval import keeping, results
from llmaas_plugins.demo.report import as_json
from llmaas_plugins.demo.run import DemoOptions, DemoRun
from llmaas_plugins.demo.worker import CallResult, Usage
from llmaas_plugins.flash_weights.disk import Rate

MIB = 1 << 20
TRANSCRIBED = {"stress", "tolerance-weight"}
"""Results that no command writes as rows."""
RECORD = {
    "command": "llmaas demo --json demo.json",
    "machine": "2 cores of a machine",
    "versions": {"llama-cpp-python": "0.3.36", "llmaas-plugins": "0.1.0"},
    "date": "2026-11-23",
    "commit": "0123456789",
}


def demo():
    """Return the JSON of a demo of two calls, whose second one switches contexts."""

    def calls(leave_ms, enter_ms):
        first = CallResult(0.0, None, 0.02, 0.05, 23, 0.001, 40, "Yes.")
        return [first, CallResult(leave_ms / 1e3, enter_ms / 1e3, 0.0456, 0.06, 23, 0.0, 90, "No.")]

    found = {"recompute": calls(0.01, 123.4), "llmaas": calls(0.16, 1.19)}
    usage = {name: Usage(80 * MIB, 7 * MIB, 13 * MIB) for name in found}
    return as_json(DemoRun(DemoOptions(Path("model.gguf")), [], [], 7 * MIB, found, usage))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of results in place of the committed ones, which stay as they are."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(results, "RESULTS", folder)
    return folder


@pytest.fixture
def output(tmp_path):
    """Return a file with a demo's output, with a fixed record of its run."""
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(demo() | {"run": RECORD}))
    return path


def test_every_result_has_a_maker_or_is_transcribed():
    names = {path.stem for path in results.RESULTS.glob("*.json")}
    assert names == keeping.makers().keys() | TRANSCRIBED
    assert all(results.load(name).source == "transcribed from docs" for name in TRANSCRIBED)


def test_a_kept_output_is_what_the_docs_show(folder, output, capsys):
    assert results.main(["keep", "demo-ratios", str(output)]) == 0
    assert "demo-ratios.json: 1 rows, 0 before; `make results`" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["demo-ratios.json"]
    found = json.loads((folder / "demo-ratios.json").read_text())
    assert {key: found[key] for key in RECORD} == RECORD
    assert found["source"] == "kept from demo.json"
    old = "<!-- result: demo-ratios -->\nold\n<!-- /result -->"
    shown = results.rewritten(old)
    assert "| recompute | 91.4× (91.4–91.4) | 103.7× (103.7–103.7) |" in shown
    assert "Date: 2026-11-23. Commit: 0123456789.*" in shown
    before = (folder / "demo-ratios.json").read_bytes()
    assert results.main(["keep", "demo-ratios", str(output)]) == 0
    assert (folder / "demo-ratios.json").read_bytes() == before
    assert "1 rows, 1 before" in capsys.readouterr().out
    assert results.rewritten(shown) == shown


def test_outputs_of_several_runs_are_recorded_together(output):
    document = json.loads(output.read_text())
    other = document | {"run": RECORD | {"command": "make demo", "commit": None}}
    table = keeping.makers()["demo"]([document])
    found = keeping.kept(table, [document, other], ["a.json", "b.json"])
    assert found["command"] == "llmaas demo --json demo.json; make demo"
    assert (found["machine"], found["commit"]) == (RECORD["machine"], RECORD["commit"])
    assert found["source"] == "kept from a.json, b.json"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("speed", "{}", "no study makes speed; expected one of all-on, "),
        ("demo", "{", "cannot be read: "),
        ("demo", "[]", "cannot be read: found no JSON object"),
        ("demo", "{}", "demo cannot be made of "),
        ("demo", '{"rows": []}', "'systems' is missing"),
        ("knn-users", '{"settings": {"figure": "fig9"}, "rows": []}', "the output of fig9"),
        ("tolerance-curve", '{"settings": {"figure": "fig12"}, "rows": []}', "expected that of"),
        ("switching", '{"settings": {"figure": "fig13"}, "runs": []}', "the output of fig13"),
        ("codecs", '{"benchmarks": []}', "found no run of bench_codec::bench_decode"),
        ("elastic-types", '{"types": []}', "the part types was not measured"),
        ("disk", '{"machine": {"disk": {"rates": []}}}', "no measured rates"),
    ],
)
def test_bad_input_is_refused(name, content, problem, folder, capsys):
    path = folder.parent / "output.json"
    path.write_text(content)
    assert results.main(["keep", name, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("results: error: ")
    assert problem in error
    assert list(folder.iterdir()) == []


def test_outputs_that_do_not_belong_together_are_refused(folder, output, tmp_path, capsys):
    assert results.main(["keep", "demo", str(output), str(output)]) == 2
    assert "found 2 outputs, expected one" in capsys.readouterr().err
    assert results.main(["keep", "demo", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: " in capsys.readouterr().err
    document = json.loads(output.read_text())
    other = document | {"run": RECORD | {"versions": {"llama-cpp-python": "0.4"}}}
    with pytest.raises(ValueError, match="outputs of versions"):
        keeping.kept(keeping.makers()["demo"]([document]), [document, other], ["a", "b"])
    output.write_text(json.dumps({key: document[key] for key in document if key != "run"}))
    assert results.main(["keep", "demo", str(output)]) == 2
    assert "'versions' is missing" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_demo():
    assert made("demo", demo()) == [
        ["recompute", "123", "123", "123", "0.01", "123", "0.50", "32.8", "418", "7.00", "13.0"],
        [
            "**llmaas**",
            *("**1.35**", "**1.35**", "**1.35**", "0.16", "1.19"),
            *("0.50", "32.8", "418", "7.00", "13.0"),
        ],
    ]
    assert made("demo-epyc", demo()) == made("demo", demo())


def test_rates_of_a_disk():
    sizes = {row[0]: int(row[0].split()[0]) << 10 for row in committed_rows("disk")}
    rates = [
        Rate(sizes[row[0]], depth, 1e9 * float(cell))
        for row in committed_rows("disk")
        for depth, cell in zip((1, 4, 16, 64, 256), row[1:], strict=True)
        if cell
    ]
    plan = {"run": RECORD, "machine": {"disk": {"rates": rates}}}
    assert made("disk", plan) == committed_rows("disk")
