"""Files of trained encoders."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from damages import flip
from tiny_encoders import N_EMBD, N_POSITIONS, VOCABULARY, write_package

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.short_prompts.encoder import model_file
from llmaas_plugins.short_prompts.encoder.body import read_body
from llmaas_plugins.short_prompts.encoder.model_file import (
    GENERAL,
    EncoderFile,
    Head,
    encoder_path,
    find_encoder,
)

HEAD = Head(np.arange(2 * N_EMBD, dtype=np.float32).reshape(2, -1), np.array([1, -1], np.float32))


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    return read_body(write_package(tmp_path_factory.mktemp("package")))


@pytest.fixture
def path(body, tmp_path):
    EncoderFile.write(tmp_path / "encoder.gguf", body, {}, HEAD)
    return tmp_path / "encoder.gguf"


def test_a_file_has_the_last_layer_the_vocabulary_and_the_bodys_digest(body, path):
    found = EncoderFile.read(path)
    np.testing.assert_array_equal(found.head.weight, HEAD.weight)
    np.testing.assert_array_equal(found.head.bias, HEAD.bias)
    assert found.vocabulary == VOCABULARY
    assert (found.n_positions, found.body) == (N_POSITIONS, body.digest)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_the_older_file(body, path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(model_file, "_add_vocabulary", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EncoderFile.write(path, body, {}, HEAD)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_damaged_headers_are_refused_or_change_nothing_else(path):
    header_end = path.read_bytes().index(b"token_embd.weight")
    chance = np.random.default_rng(0)
    for at in chance.integers(0, header_end, 200):
        flip(path, int(at))
        with contextlib.suppress(ConfigError):
            found = EncoderFile.read(path)
            assert found.head.weight.shape[1] == N_EMBD
            assert np.isfinite(found.head.weight).all()
        flip(path, int(at))


def test_other_files_are_refused(tmp_path, reference_model):
    (tmp_path / "text").write_text("no model")
    for path in (tmp_path / "text", reference_model):
        with pytest.raises(ConfigError, match="is no encoder of prompts"):
            EncoderFile.read(path)
    with pytest.raises(StoreError, match="No such file"):
        EncoderFile.read(tmp_path / "missing")


def test_a_models_own_encoder_comes_before_the_general_one(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "DIRECTORY", tmp_path)
    assert find_encoder("abc") is None
    encoder_path(GENERAL).touch()
    assert find_encoder("abc") == find_encoder(None) == encoder_path(GENERAL)
    encoder_path("abc").touch()
    assert find_encoder("abc") == encoder_path("abc")
    assert find_encoder(None) == encoder_path(GENERAL)
