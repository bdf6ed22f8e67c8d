"""The recall model's training: its forward pass is llama.cpp's, and its output loads there."""

from __future__ import annotations

import lzma

import numpy as np
import pytest

from llmaas_eval.data import packaged_lines
from llmaas_eval.tolerance.engine import Engine

torch = pytest.importorskip("torch", reason="make test-train installs it")
train_recall = pytest.importorskip("llmaas_eval.tolerance.train_recall")
trainable = pytest.importorskip("llmaas_eval.trainable")


def log_p(path, tokens):
    with Engine(path, n_ctx=256) as engine:
        blob = engine.prefill(tokens[:16]).blob
        return engine.go_on(blob, tokens[16:]).log_p


def test_it_computes_what_the_engine_computes(reference_model):
    tokens = list(range(300, 340))
    model = trainable.Trainable(reference_model)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0, 16:]
    found = torch.log_softmax(logits.double(), -1).numpy()
    expected = log_p(reference_model, tokens)
    assert np.abs(found - expected)[expected > -8].max() < 0.2  # the engine rounds activations
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_a_model_that_was_trained_a_little_is_another_model(reference_model, tmp_path):
    with lzma.open(tmp_path / "text.xz", "wt") as file:
        file.write("\n<|doc|>\n".join("\n".join(lines) for lines in packaged_lines()))
    arguments = ["--text", str(tmp_path / "text.xz"), "--minutes", "0.02", "--lengths", "128"]
    train_recall.main([*arguments, "-o", str(tmp_path / "recall.gguf")])
    tokens = list(range(300, 340))
    before, after = log_p(reference_model, tokens), log_p(tmp_path / "recall.gguf", tokens)
    assert 0 < np.abs(before - after).mean() < 2
