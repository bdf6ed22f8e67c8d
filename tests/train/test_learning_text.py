"""Text to learn from: its windows, the model's own text, and what a complete run removes."""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
import pytest

from llmaas_plugins.cli import learning_text


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


def test_own_text_is_kept_until_it_was_learned_from(tmp_path):
    path = learning_text.own_text_path(tmp_path, 8)
    tokens = np.arange(8, dtype="<i4")
    content = tokens.tobytes()
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert learning_text._read(path, 8, 100).tolist() == tokens.tolist()
    assert learning_text._read(path, 7, 100) is None  # too long
    assert learning_text._read(path, 8, 7) is None  # a token that the model does not have
    path.write_bytes(path.read_bytes()[:-1])
    assert learning_text._read(path, 8, 100) is None  # torn


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], None),
        (["text-16.i32"], {"text-16.i32"}),
        (["notes.txt"], {"notes.txt"}),
        (["b.npz"], {"b.npz", "text-8.i32"}),
    ],
)
def test_a_complete_run_removes_its_own_files_only(tmp_path, others, left):
    folder = tmp_path / "model.gguf.recovery"
    folder.mkdir()
    text = learning_text.own_text_path(folder, 8)
    for path in (folder / "a.npz", text, *(folder / name for name in others)):
        path.touch()
    learning_text.remove_progress(folder, [folder / "a.npz", folder / "none"], text)
    found = {each.name for each in folder.iterdir()} if folder.exists() else None
    assert found == left
