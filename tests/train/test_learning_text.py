"""Text to learn from: its windows, and the model's own text."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from llmaas_plugins.cli import learning_text
from llmaas_plugins.files import array_file


class Evaluator:
    """Evaluator whose windows have 512 tokens; it is its own context and its own model."""

    def __enter__(self):
        return self, self

    def __exit__(self, *_):
        return None

    def tokenize(self, content, *_):
        return range(len(content))

    def chosen(self, text, _n_tokens):
        return (text[at : at + 512] for at in range(0, len(text), 512))


@pytest.mark.parametrize(
    ("n_tokens", "shape"),
    [(300, (1, 300)), (512, (1, 512)), (1024, (2, 512)), (100 * 512 + 260, (100, 512))],
)
def test_only_a_last_window_that_is_shorter_is_left_out(tmp_path, monkeypatch, n_tokens, shape):
    monkeypatch.setattr(learning_text, "evaluator_of", lambda _model: Evaluator())
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(n_tokens))
    args = argparse.Namespace(model=None, text=[text])
    found = learning_text.learning_windows(args, n_tokens, tmp_path)
    assert np.array_equal(found, np.arange(shape[0] * shape[1]).reshape(shape))


class Writer(Evaluator):
    """Evaluator that writes; each token is the seed of its round, and is counted."""

    n_vocab = 100

    def __init__(self, most=10**6):
        self.n_said, self._most = 0, most

    def say(self, n_tokens, seed, progress):
        if self.n_said + n_tokens > self._most:
            raise KeyboardInterrupt
        self.n_said += n_tokens
        progress(n_tokens)
        return np.full(n_tokens, seed, np.int32)


def test_own_text_is_continued_where_it_was_interrupted(tmp_path, monkeypatch, reference_model):
    """Each model has its own, and a damaged file counts as none."""
    args = argparse.Namespace(model=reference_model, text=None)

    def written(writer):
        monkeypatch.setattr(learning_text, "evaluator_of", lambda _model: writer)
        return learning_text.learning_windows(args, 2560, tmp_path).ravel().tolist()

    with pytest.raises(KeyboardInterrupt):
        written(Writer(most=2048))
    rest = Writer()
    expected = [0] * 1024 + [1] * 1024 + [2] * 512
    assert written(rest) == expected
    assert rest.n_said == 512
    path = learning_text.own_text_path(tmp_path, 2560)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert written(again := Writer()) == expected
    assert again.n_said == 2560
    for wrong in (
        np.full(1024, 100, np.int32),
        np.full(1025, 1, np.int32),
        np.full(9, 1, np.int64),
    ):
        about, rounds = array_file.read_arrays(path, 1 << 20)
        array_file.write_arrays(path, about, rounds | {"text 1": wrong})
        assert written(mended := Writer()) == expected
        assert mended.n_said == 1024
    args.model = tmp_path / "other.gguf"
    args.model.write_bytes(reference_model.read_bytes() + b" ")
    assert written(other := Writer()) == expected
    assert other.n_said == 2560
