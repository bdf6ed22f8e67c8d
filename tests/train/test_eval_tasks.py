"""The study of tasks: tuning that goes on, and the whole command on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGUFReader

from llmaas_eval.families import write_family
from llmaas_eval.tasks.cli import main
from llmaas_eval.tasks.questions import generated_tasks
from llmaas_eval.weights import read_weights

torch = pytest.importorskip("torch", reason="make test-train installs it")
tuning = pytest.importorskip("llmaas_eval.tasks.tuning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_family("llama", tmp_path_factory.mktemp("tasks") / "model.gguf")


@pytest.fixture(scope="module")
def tasks():
    return generated_tasks(21, seed=0)


def test_windows_weigh_answers(model, tasks):
    windows = tuning.task_windows(model, tasks, 4, seed=0)
    assert windows.shape == (4, 128, 2)
    tokens, weights = windows[..., 0], windows[..., 1]
    assert (tokens[:, 0] == 1).all()
    assert set(np.unique(weights)) == {1, 25}
    runs = np.diff(np.flatnonzero(np.diff(weights[0])))
    assert set(runs[::2].tolist()) == {5}  # "The function is" has four tokens, and the choice one


def test_the_loss_is_of_the_next_tokens_by_their_weights():
    windows = np.zeros((1, 3, 2), np.int32)
    windows[0, :, 0], windows[0, :, 1] = [0, 1, 2], [9, 1, 3]
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 1] = 2.0
    loss, gradient = tuning._loss(logits, windows)
    surprise = -torch.log_softmax(logits[0], -1)
    assert loss == pytest.approx(float(surprise[0, 1] + 3 * surprise[1, 2]) / 4)
    assert gradient.shape == logits.shape
    assert gradient[0, 1, 2] == pytest.approx(3 / 4 * (1 / 4 - 1))


def test_tuning_that_was_stopped_goes_on(model, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_N_ROWS", 2)
    whole = tuning.tune(model, tasks, 6 * 256, tmp_path / "whole", seed=0)
    advance, left = tuning._loss, [3]

    def stopping(outputs, windows):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return advance(outputs, windows)

    monkeypatch.setattr(tuning, "_loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(model, tasks, 6 * 256, tmp_path / "stopped", seed=0)
    assert [path.suffix for path in (tmp_path / "stopped").iterdir()] == [".npz"]
    left[0] = 3  # the other half
    path = tuning.tune(model, tasks, 6 * 256, tmp_path / "stopped", seed=0)
    assert path.read_bytes() == whole.read_bytes()
    assert [*(tmp_path / "stopped").iterdir()] == [path]
    left[0] = 0
    assert tuning.tune(model, tasks, 6 * 256, tmp_path / "stopped", seed=0) == path
    before, after = read_weights(GGUFReader(model)), read_weights(GGUFReader(path))
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_the_command_tunes_distills_and_answers(model, tmp_path, capsys):
    command = ["--model", str(model), "--out", str(tmp_path / "out"), "--quick"]
    options = ["--arms", "none", "distilled", "--sparse", "answers"]
    assert main([*command, *options, "--json", "--pictures", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {(row["arm"], row["sparsity"]) for row in document["rows"]} == {
        ("whole", 0.0), *((arm, x) for arm in ("none", "distilled") for x in (0.5, 0.6, 0.7, 0.8)),
    }  # fmt: skip
    assert {len(row["right"]) for row in document["rows"]} == {21}
    assert (tmp_path / "sparse-tasks.png").exists()
    assert main([*command, *options]) == 0  # nothing is trained again
    out, err = capsys.readouterr()
    assert "| functions | answers | 50 % |" in out
    assert "time: about" not in err
