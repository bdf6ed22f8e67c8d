"""The study of distillation: arms that learn what they say, and results measured only once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flash_models import tensors_of
from gguf import GGMLQuantizationType

from llmaas_eval.distillation.cli import main
from llmaas_eval.distillation.report import TABLES, closure, report
from llmaas_eval.families import write_family
from llmaas_eval.sparse.ours import with_channels

torch = pytest.importorskip("torch", reason="make test-train installs it")
distillation = pytest.importorskip("llmaas_plugins.training.distillation")
study = pytest.importorskip("llmaas_eval.distillation.study")

WINDOWS = np.random.default_rng(0).integers(3, 4000, (12, 32), np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "model.gguf"
    return write_family("llama", path, weights=GGMLQuantizationType.Q8_0)


@pytest.fixture
def material(model, tmp_path):
    kinds = {"own": WINDOWS[8:10], "other": WINDOWS[10:]}
    recipe = distillation.SparseRecipe(n_tokens=128, n_prompt=8)
    tensors = tensors_of(model)
    return study.Material(model, tensors, WINDOWS[:8], kinds, recipe, tmp_path / "out")


def test_every_arm_has_rows_that_are_measured_once(material, monkeypatch):
    rows = study.study(material, [*study.ARMS])
    found = {(row["arm"], row["sparsity"], row["kind"]): row for row in rows}
    assert len(found) == len(rows) == len(study.ARMS) * len(study.USED) * 2
    assert found["none", 0.6, "own"]["n_tokens"] == 0
    losses = {tuple(found[arm, 0.6, "own"]["loss"]) for arm in study.ARMS}
    assert len(losses) == len(study.ARMS)  # each arm has learned something else
    for row in rows:
        assert row["whole"] == pytest.approx(found["none", 0.4, row["kind"]]["whole"])
    assert not [*material.folder.glob("*.npz")]

    monkeypatch.setattr(study, "_measured", lambda *_: pytest.fail("measured again"))
    assert study.study(material, [*study.ARMS]) == rows
    document = {"rows": rows, "n_tokens": 128}
    table = report(document)
    assert "| fixed 80 % |" in table
    assert "| trained | tokens | 40 % | 50 % | 60 % | 70 % | 80 % |" in table
    names = TABLES.keys() - {"sparse-distillation-finished"}
    kept = {name: TABLES[name]([document, document]) for name in names}
    n_lines = len(study.ARMS) + 1  # with the whole model's; what two outputs repeat counts once
    assert [len(table.rows) for table in kept.values()] == [n_lines] * len(names)
    assert {row[0] for row in kept["sparse-distillation-kinds"].rows} == {"other"}


def test_a_run_that_was_stopped_goes_on(material, monkeypatch):
    expected = study.study(material, ["drawn"])
    for path in material.folder.iterdir():
        path.unlink()
    seen = []

    class Bar(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def update(self, n):
            seen.append(n)
            if len(seen) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(study, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        study.study(material, ["drawn"])
    assert [path.suffix for path in material.folder.iterdir()] == [".npz"]
    found = study.study(material, ["drawn"])
    assert seen == [0, 64, 64, 64]
    assert [row["loss"] for row in found] == [row["loss"] for row in expected]


def test_closure_is_the_share_of_the_gap_that_is_won_back():
    base = {"loss": [3.0, 4.0], "whole": [2.0, 2.0]}
    found = closure({"loss": [2.5, 3.0], "whole": [2.0, 2.0]}, base)
    assert found.value == pytest.approx(0.5)
    assert found.low <= 0.5 <= found.high


def test_the_command_prints_json(reference_model, tmp_path, capsys):
    command = ["--model", str(reference_model), "--out", str(tmp_path), "--quick", "--json"]
    assert main([*command, "--tokens", "128", "--arms", "none", "drawn"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["arm"] for row in document["rows"]} == {"none", "drawn"}
    assert {row["kind"] for row in document["rows"]} == {"packaged chats"}


def test_a_finished_file_is_judged_in_the_engine_too(reference_model, tmp_path, capsys):
    model = with_channels(reference_model, tmp_path, WINDOWS[:4])
    command = ["--model", str(model), "--quick", "--finished"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["sparsity"]: row for row in document["finished"]}
    assert list(rows) == [*study.USED]
    for row in rows.values():
        assert row["distilled"] is None
        assert np.mean(row["engine"]["top-k"]) == pytest.approx(np.mean(row["file"]), abs=0.1)
        assert row["engine"]["threshold"] != row["engine"]["top-k"]
    assert np.mean(rows[0.8]["file"]) > np.mean(rows[0.4]["file"])
    assert np.mean(rows[0.8]["file"]) > np.mean(rows[0.8]["whole"])
    assert len(TABLES["sparse-distillation-finished"]([document]).rows) == len(rows)
    lines = report(document).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["40 %", "50 %", "60 %", "70 %", "80 %"]


def test_a_finished_file_that_is_missing_is_refused(reference_model, tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.symlink_to(reference_model)
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(model), "--quick", "--finished"])
    assert str(model.with_suffix(".channels")) in capsys.readouterr().err
