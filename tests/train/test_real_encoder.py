"""The pretrained encoder of the package, of 83 MB: llama.cpp computes what numpy computes."""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np
import pytest
from llama_cpp import Llama
from tiny_encoders import forward

from llmaas_plugins.short_prompts.encoder.body import PACKAGE, body_folder, read_body
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, Head
from llmaas_plugins.short_prompts.encoder.outputs import Outputs
from llmaas_plugins.short_prompts.encoder.word_pieces import WordPieces

TEXT = (
    "Caf\u00e9s near Platform 9\u00be don't open at 5:30 a.m.; e-mail info@example.com, call "
    "Zo\u00eb's unbelievably re-engineered hyper-parameters! \u6f22\u5b57 C++ [SEP] _x_ $5.00"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("make test-train installs it")
    body = read_body(body_folder())
    path = tmp_path_factory.mktemp("real") / "encoder.gguf"
    head = Head(np.zeros((2, body.n_embd), np.float32), np.zeros(2, np.float32))
    EncoderFile.write(path, body, {}, head)
    return body, path


def test_outputs_equal_numpys(real):
    body, path = real
    pieces = WordPieces(body.vocabulary)
    ids = np.array([pieces.begin, *pieces.of(TEXT.split()).ids, pieces.end], np.int32)
    outputs = Outputs(path, body.n_positions, 1)
    found, expected = outputs.of(ids).copy(), forward(body.weights, ids, body.n_layers)
    outputs.close()
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


def test_pieces_equal_llama_cpps(real):
    body, path = real
    ids = WordPieces(body.vocabulary).of(TEXT.split()).ids
    with contextlib.closing(Llama(str(path), vocab_only=True, verbose=False)) as vocab:
        assert vocab.tokenize(TEXT.encode(), False, False) == ids.tolist()
