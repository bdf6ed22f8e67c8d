"""The study of memory and time: importance of columns, and the whole command on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_eval.families import write_family
from llmaas_eval.pareto.cli import main
from llmaas_eval.pareto.types import importance
from llmaas_patches.native.packing import model_tensors

torch = pytest.importorskip("torch", reason="make test-train installs it")
oracles = pytest.importorskip("llmaas_eval.sparse.oracle")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_family("llama", tmp_path_factory.mktemp("pareto") / "model.gguf")


def test_importance_is_the_mean_square_of_each_column(model):
    windows = np.random.default_rng(0).integers(3, 4000, (2, 16))
    found = importance(model, list(windows))
    tensors = model_tensors(model)
    matrices = {name for name, info in tensors.items() if info.is_matrix and "blk." in name}
    assert found.keys() == matrices
    assert all(len(values) == tensors[name].shape[0] for name, values in found.items())
    oracle = oracles.Oracle(model)
    read = np.concatenate([oracle.read(window)[1, "ffn_down"] for window in windows])
    expected = np.square(read).mean(0)
    np.testing.assert_allclose(found["blk.1.ffn_down.weight"], expected, rtol=1e-4)


@pytest.mark.slow
def test_the_command_makes_all_files_once(model, tmp_path, capsys):
    command = ["--model", str(model), "--out", str(tmp_path / "out"), "--quick", "--json"]
    assert main([*command, "--pictures", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    families = dict.fromkeys(row["family"] for row in document["rows"])
    assert [*families] == [
        "llama.cpp", "sparse", "sparse, distilled", "level", "level with adapter",
    ]  # fmt: skip
    assert all(0 < row["memory"] <= 1 and min(row["ms"]) > 0 for row in document["rows"])
    assert (tmp_path / "sparse-pareto.png").exists()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.gguf")}
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == document["rows"]
    assert {path: path.stat().st_mtime_ns for path in files} == files
