"""Small models trained from scratch: shapes, training that goes on, and the whole command."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_eval.models import Shape
from llmaas_eval.scratch.cli import main
from llmaas_eval.scratch.shapes import SHAPES, share_of, trained
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.reference_model import reference_model_path

torch = pytest.importorskip("torch", reason="make test-train installs it")
training = pytest.importorskip("llmaas_eval.scratch.training")

TINY = Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=192, n_ctx=64)


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(0)
    start = rng.integers(3, 400, (32, 1))
    return ((start + np.arange(32)) % 400 + 3).astype(np.int32)  # each token follows from the last


def test_a_model_has_at_least_the_weights_of_its_level():
    whole = blocks_of(reference_model_path())
    assert (SHAPES[1.0].n_layer, SHAPES[1.0].n_ff) == (whole.n_layers, whole.n_ff)
    for level, shape in SHAPES.items():
        assert level <= share_of(shape) < level + 0.07


def test_training_that_was_stopped_goes_on(windows, tmp_path, monkeypatch):
    whole = training.train_from_scratch(TINY, windows, tmp_path / "whole" / "model.gguf", seed=0)
    loss, left = training._loss, [2]

    def stopping(outputs, some):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return loss(outputs, some)

    monkeypatch.setattr(training, "_loss", stopping)
    path = tmp_path / "stopped" / "model.gguf"
    with pytest.raises(KeyboardInterrupt):
        training.train_from_scratch(TINY, windows, path, seed=0)
    assert not path.exists()
    left[0] = 2  # the other half
    training.train_from_scratch(TINY, windows, path, seed=0)
    assert path.read_bytes() == whole.read_bytes()
    assert [*path.parent.iterdir()] == [path]
    left[0] = 0
    assert training.train_from_scratch(TINY, windows, path, seed=0) == path


def test_a_trained_model_predicts_the_text(windows, tmp_path):
    path = training.train_from_scratch(TINY, np.tile(windows, (16, 1)), tmp_path / "m.gguf", seed=0)
    with contextlib.closing(Llama(str(path), n_ctx=64, logits_all=True, verbose=False)) as llama:
        llama.eval(windows[0, :-1].tolist())
        logits = torch.from_numpy(llama.scores[: llama.n_tokens].copy())
    targets = torch.from_numpy(windows[0, 1:].astype(np.int64))
    assert float(torch.nn.functional.cross_entropy(logits, targets)) < 7  # of 8.3 by chance


def test_missing_models_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"llmaas_eval.scratch --out"):
        trained(tmp_path)


@pytest.mark.slow
def test_the_command_trains_and_measures(tmp_path, capsys):
    command = ["--out", str(tmp_path / "out"), "--quick"]
    assert main([*command, "--parts", "train"]) == 0
    assert set(trained(tmp_path / "out")) == {0.2, 0.3, 0.4, 0.5, 0.6}
    assert main([*command, "--json", "--levels", "0.6", "0.2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["model"], row["level"]) for row in rows] == [
        ("ours", 0.6), ("ours", 0.2), ("from scratch", 0.6), ("from scratch", 0.2),
    ]  # fmt: skip
    loss = {(row["model"], row["level"]): np.mean(row["loss"]) for row in rows}
    assert loss["ours", 0.6] < loss["ours", 0.2] < loss["from scratch", 0.2]
    assert main([*command, "--levels", "0.6"]) == 0
    assert "| 60 % | from scratch | 62 % |" in capsys.readouterr().out
