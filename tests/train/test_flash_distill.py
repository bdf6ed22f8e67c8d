"""``llmaas flash distill``: the file it writes, what stays bit-identical, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from unittest.mock import Mock

import numpy as np
import pytest
from flash_models import tensors_of
from gguf import GGMLQuantizationType

from llmaas_eval.data import packaged_documents
from llmaas_eval.families import write_family
from llmaas_plugins import activate
from llmaas_plugins.cli import files
from llmaas_plugins.cli.flash import distill as flash_distill
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channels import channel_path, open_channels
from llmaas_plugins.flash_weights.grids import matrices_in

torch = pytest.importorskip("torch", reason="make test-train installs it")
sparse_student = pytest.importorskip("llmaas_plugins.training.sparse_student")

N_PROMPT, SPARSITY = 12, 0.6
ARENA, N_WINDOW = 4 << 20, 96


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch):
    """Cut the text's windows into shorter ones, which take less time."""
    windows_in = flash_distill.learning_windows

    def short(*args):
        found = windows_in(*args)
        return found[:, : found.shape[1] // N_WINDOW * N_WINDOW].reshape(-1, N_WINDOW)

    monkeypatch.setattr(flash_distill, "learning_windows", short)


def packed(path):
    """Write a text and a channel file beside a model."""
    path.with_suffix(".txt").write_text("\n".join(packaged_documents())[:9000])
    text = str(path.with_suffix(".txt"))
    assert main(["flash", "pack", "--sparse", "--text", text, str(path)]) == 0
    return path


def copied(original, folder):
    for suffix in (".gguf", ".txt", ".packed", ".channels"):
        shutil.copy(original.with_suffix(suffix), folder / f"model{suffix}")
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def original(reference_model, tmp_path_factory):
    """Return a copy of the packaged model with its channel file, and a text beside it."""
    path = tmp_path_factory.mktemp("distill") / "model.gguf"
    return packed(shutil.copy(reference_model, path))


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Return a small random model with the same files beside it."""
    path = tmp_path_factory.mktemp("noise") / "model.gguf"
    return packed(write_family("llama", path, weights=GGMLQuantizationType.Q8_0))


@pytest.fixture
def model(original, tmp_path):
    return copied(original, tmp_path)


@pytest.fixture
def small(noise, tmp_path):
    return copied(noise, tmp_path)


def logits(path, mode, tokens, sparsity=SPARSITY):
    """Return logits of a prompt and of an answer, and what the plugin's status says."""
    from llama_cpp import Llama

    table = {"mode": mode, "arena": ARENA, "sparsity": sparsity, "selection": "top_k"}
    settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with (
        activate({"on_error": "raise", "plugins": {"flash_weights": table}}) as suite,
        contextlib.closing(Llama(str(path), logits_all=True, **settings)) as llama,
    ):
        llama.eval(tokens[:N_PROMPT])
        is_sparse = mode == "sparse"
        plugin = suite.plugin("flash_weights")
        with plugin.answer(llama) if is_sparse else contextlib.nullcontext():
            for token in tokens[N_PROMPT:]:
                llama.eval([token])
        found = np.array(llama.scores[: len(tokens)])
        status = suite.status()["plugins"]["flash_weights"]["distilled"]
    return found[:N_PROMPT], found[N_PROMPT:], status


def oracle_logits(path, tokens, sparsity=SPARSITY):
    """Return logits of an answer in torch, by the matrices of the channel file."""
    tensors = tensors_of(path)
    grids = sparse_student.grids_in(path, channel_operands(tensors), tensors)
    student = sparse_student.SparseStudent(sparse_student.MaskedTeacher(path), grids)
    file = open_channels(channel_path(path), path, tensors)
    student.load(dict(matrices_in(file)))
    student.teacher.share_by({one.operand: one.shares for one in file.operands.values()})
    student.is_rounded = False
    student.teacher.mask = sparse_student.Mask(sparsity, N_PROMPT)
    with torch.no_grad():
        outputs = student(torch.tensor([tokens], dtype=torch.int32))
        return student.teacher.logits(outputs[0]).numpy()


@pytest.mark.slow
def test_answers_change_and_nothing_else(model, capfd):
    tokens = list(range(300, 348))
    prompt, answer, status = logits(model, "sparse", tokens)
    exact = logits(model, "exact", tokens)
    assert not status
    all_before, before = oracle_logits(model, tokens, 0.0), oracle_logits(model, tokens)

    options = ["--tokens", "4096", "--text", str(model.with_suffix(".txt")), "--json"]
    capfd.readouterr()
    assert main(["flash", "distill", str(model), *options]) == 0
    report = json.loads(capfd.readouterr().out)
    check_report(report, model)

    new_prompt, new_answer, status = logits(model, "sparse", tokens)
    assert status[str(model)]["n_tokens"] == 4096
    assert np.array_equal(new_prompt, prompt)
    for found, expected in zip(logits(model, "exact", tokens)[:2], exact[:2], strict=True):
        assert np.array_equal(found, expected)
    assert not np.array_equal(new_answer, answer)
    # the engine rounds activations to 8 bits, so values at the edge of a mask may change places
    new = oracle_logits(model, tokens)
    assert divergence(new, new_answer) < 2 * divergence(before, answer) < 0.2
    everything = logits(model, "sparse", tokens, 0.0)[1]
    error = divergence(oracle_logits(model, tokens, 0.0), everything)
    assert error < 0.01
    assert divergence(all_before, everything) > 3 * error
    assert main(["flash", "check", str(model)]) == 0
    assert "distilled on 4,096 tokens at 40 to 80 % sparsity: sound" in capfd.readouterr().out


def check_report(report, model):
    assert report["file"] == str(channel_path(model))
    assert [row["sparsity"] for row in report["sparsities"]] == [0.5, 0.6, 0.7, 0.8]
    for row in report["sparsities"]:
        assert row["perplexity_dense"] < row["perplexity_before"]
        assert row["kl"] < row["kl_before"] or row["sparsity"] < 0.6
    assert not model.with_name("model.channels.distill").exists()


def divergence(expected, found):
    """Return the mean KL of next-token distributions, in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected, found))
    return (np.exp(p) * (p - q)).sum(-1).mean()


class Bar:
    """Progress bar that sends Ctrl-C at one of its updates."""

    def __init__(self, n_updates=0):
        self.seen, self._n_left = [], n_updates

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, n):
        self.seen.append(n)
        self._n_left -= 1
        if self._n_left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_learned_and_the_file(small, monkeypatch, capfd):
    folder, text = small.with_name("model.channels.distill"), small.with_suffix(".txt")
    before = channel_path(small).read_bytes()
    learning = [Bar(3), Bar()]
    monkeypatch.setattr(
        flash_distill,
        "progress_bar",
        lambda what, *_: learning.pop(0) if what == "learning" else Bar(),
    )
    again = learning[1]
    command = ["flash", "distill", str(small), "--tokens", "2048", "--text", str(text)]
    capfd.readouterr()
    assert main(command) == 130
    printed, said = capfd.readouterr()
    assert said == f"llmaas: stopped; progress is kept in {folder}; the same command goes on\n"
    assert printed.startswith("device: ")
    assert "time: about" in printed
    assert channel_path(small).read_bytes() == before
    monkeypatch.setattr(flash_distill, "shares_on", lambda *_: pytest.fail("measured again"))
    assert main(command) == 0
    assert again.seen[0] == 2 * again.seen[1]  # two steps were done before Ctrl-C
    assert sum(again.seen) == 11 * 2 * N_WINDOW
    assert not folder.exists()


@pytest.mark.slow
def test_matrices_that_are_no_better_are_not_written(small, monkeypatch, capfd):
    from llmaas_plugins.training import distillation

    monkeypatch.setattr(distillation, "is_better", lambda *_: False)
    before, text = channel_path(small).read_bytes(), small.with_suffix(".txt")
    command = ["flash", "distill", str(small), "--tokens", "2048", "--text", str(text)]
    assert main(command) == 0
    assert "nothing was written: the distilled matrices are no better" in capfd.readouterr().out
    assert channel_path(small).read_bytes() == before


def test_too_little_memory_is_said_first(model, monkeypatch, capfd):
    from llmaas_plugins.training import device

    monkeypatch.setattr(device, "available_bytes", lambda: 0)
    assert main(["flash", "distill", str(model)]) == 2
    said = capfd.readouterr().err
    assert "of memory, but 0 KiB are available on " in said  # its own memory counts once
    assert "Run it on a machine with more memory" in said
    assert not model.with_name("model.channels.distill").exists()


def test_a_disk_without_room_is_said_first(model, monkeypatch, capfd):
    from llmaas_plugins.machine import Room

    monkeypatch.setattr(files, "room", lambda _: Room(is_writable=True, free_bytes=1 << 20))
    assert main(["flash", "distill", str(model)]) == 2
    assert "distillation writes up to" in (said := capfd.readouterr().err)
    assert "but 1.0 MiB are free there. Free space, or use another disk." in said
    assert not model.with_name("model.channels.distill").exists()


@pytest.mark.parametrize(("older", "left"), [(None, b"new"), (0.2, b"old"), (0.4, b"new")])
def test_a_better_older_file_stays(tmp_path, monkeypatch, older, left):
    from llmaas_plugins.flash_weights import channels
    from llmaas_plugins.training import distillation

    found = {"judging before": 0.5, "judging after": 0.3, "judging the older file": older}
    path, made = tmp_path / "model.channels", tmp_path / "distilled.channels"
    path.write_bytes(b"old")
    job = Mock(folder=tmp_path, shared=[])
    monkeypatch.setattr(distillation, "is_better", lambda before, after: before > after)
    monkeypatch.setattr(distillation, "read_channels", lambda *_: None)
    monkeypatch.setattr(channels, "open_channels", lambda *_: Mock(distilled=older))
    monkeypatch.setattr(flash_distill, "_judged", lambda _job, what: found[what])
    monkeypatch.setattr(flash_distill, "_write", lambda *_: made.write_bytes(b"new"))
    monkeypatch.setattr(flash_distill, "_train", lambda _job: tmp_path / "run.npz")
    for name in ("report_of", "lines_of", "print_report"):
        monkeypatch.setattr(flash_distill, name, lambda *_: None)
    flash_distill._run(job, path)
    assert path.read_bytes() == left
    assert not made.exists()


def test_the_folder_is_never_the_output(model, monkeypatch):
    folders = []
    monkeypatch.setattr(flash_distill, "_job", lambda *args: folders.append(args[-1]))
    monkeypatch.setattr(flash_distill, "_run", lambda *_: None)
    output = model.with_name("new.distill")
    assert main(["flash", "distill", str(model), "-o", str(output)]) == 0
    assert folders == [model.with_name("new.distill.distill")]


def test_the_model_is_not_overwritten(model, capfd):
    assert main(["flash", "distill", str(model), "-o", str(model)]) == 2
    assert "is the model itself" in capfd.readouterr().err
