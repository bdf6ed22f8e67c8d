"""``llmaas elastic`` as used by somebody who wants a smaller version of a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import logits_of
from gguf import GGMLQuantizationType as Type

from llmaas_eval.families import write_family
from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.cli.elastic import prepare as elastic_prepare
from llmaas_plugins.cli.elastic import preparing as elastic_preparing
from llmaas_plugins.cli.elastic import text as elastic_text
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.metadata import order_in, read_elastic
from llmaas_plugins.elastic.probing import TextLoss
from llmaas_plugins.elastic.scores import read_scores
from llmaas_plugins.elastic.uniform import anchors_of
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.model.quantize import WEIGHTS


@pytest.fixture
def elastic(capfd):
    """Return a function that runs the command and returns its exit code and output or error."""

    def run(*args):
        capfd.readouterr()
        code = main(["elastic", *map(str, args)])
        printed = capfd.readouterr()
        return code, printed.out if code == 0 else printed.err

    return run


@pytest.fixture(scope="module")
def folder(reference_model, tmp_path_factory):
    """Return a folder with the packaged model, scored and prepared without torch."""
    folder = tmp_path_factory.mktemp("elastic")
    shutil.copy(reference_model, folder / "model.gguf")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        model = f"{folder}/model.gguf"
        options = "--tokens", "256", "--no-search", "--keep-blocks"
        assert main(["elastic", "prepare", model, *options]) == 0
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return an unquantized model with scores."""
    path = write_family("qwen2", tmp_path_factory.mktemp("f16") / "model.gguf", weights=Type.F16)
    assert main(["elastic", "score", str(path), "--tokens", "64"]) == 0
    return path


def test_prepare_shows_what_it_made_and_restore_undoes_it(folder, elastic):
    code, printed = elastic("show", folder / "model.elastic.gguf", "--json")
    report = json.loads(printed)
    assert code == 0
    assert report["calibration"]["method"] == "fluctuation"
    assert report["calibration"]["n_tokens"] >= 250
    (table,) = report["tables"].values()
    assert [level["level"] for level in table["levels"]] == [n / 10 for n in range(10, 1, -1)]
    assert all(abs(level["share"] - level["level"]) < 0.01 for level in table["levels"])
    blocks = blocks_of(folder / "model.gguf")
    scores = read_scores(folder / "model.scores.npz", blocks, folder / "model.gguf")
    assert report["anchors"] == list(anchors_of(scores.layers))
    assert 0 in report["anchors"]  # embeddings are transformed there
    code, printed = elastic("show", folder / "model.elastic.gguf")
    assert "8 layers of 4 groups of 2 query heads, and of 768 neurons" in printed
    assert "can be restored: yes" in printed
    code, printed = elastic("restore", folder / "model.elastic.gguf", "-o", folder / "again.gguf")
    assert "identical to the source" in printed
    assert (folder / "again.gguf").read_bytes() == (folder / "model.gguf").read_bytes()


def test_neurons_of_q8_0_move_one_by_one(folder, elastic, tmp_path):
    model, path = folder / "model.gguf", tmp_path / "single.gguf"
    code, printed = elastic("prepare", model, "-o", path, "--no-search")
    assert (code, "--keep-blocks" in printed) == (0, True)
    found = read_elastic(path)
    assert (found.source, found.step) == (None, 32)
    neurons = order_in(read_header(path), replace(found.blocks, granule=1)).neurons
    scores = read_scores(folder / "model.scores.npz", blocks_of(model), model).neurons
    assert (np.diff(np.take_along_axis(scores, neurons.astype(int), axis=1)) <= 0).all()
    expected = logits_of(model)
    assert np.abs(logits_of(path) - expected).max() < 0.05 * expected.std()
    code, printed = elastic("restore", path, "-o", tmp_path / "again.gguf")
    assert (code, "was quantized when it was prepared" in printed) == (2, True)


def test_what_was_prepared_says_in_vanilla_what_the_model_says(folder):
    found, expected = (logits_of(folder / name) for name in ("model.elastic.gguf", "model.gguf"))
    assert np.abs(found - expected).max() < 0.05 * expected.std()


@pytest.mark.parametrize("weights", ["Q8_0", "Q4_K"])
def test_quantized_on_the_way_it_cannot_be_restored(original, tmp_path, elastic, weights):
    path = tmp_path / "small.gguf"
    code, printed = elastic("prepare", original, "-o", path, "--quantize", weights, "--no-search")
    assert code == 0
    assert ("levels below" in printed) == (weights == "Q4_K")
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.gguf"]
    found = read_elastic(path)
    assert found.source is None
    assert found.step == {"Q8_0": 32, "Q4_K": 256}[weights]
    code, printed = elastic("restore", path, "-o", tmp_path / "again.gguf")
    assert (code, "was quantized when it was prepared" in printed) == (2, True)
    assert "can be restored: no" in elastic("show", path)[1]


def test_widths_are_searched_for_and_compensated(original, tmp_path, elastic):
    path = tmp_path / "searched.gguf"
    code, printed = elastic("prepare", original, "-o", path, "--tokens", 64, "--compensate")
    assert code == 0
    assert "tokens, computed earlier" in printed
    found = read_elastic(path)
    assert set(found.tables) == {"uniform", "searched"}
    for level, widths in zip(found.levels, found.tables["searched"], strict=True):
        assert found.blocks.share(widths) <= level + 1e-9
    searched = [found.blocks.share(widths) for widths in found.tables["searched"]]
    assert searched == sorted(searched, reverse=True)
    assert searched[-1] < 0.2
    for biases in found.biases.values():
        assert not biases[0].any()  # nothing is left out
    for table in ("uniform", "searched"):
        n_levels = int(printed.split(f"biases of {table}: kept for ")[1].split()[0])
        kept = found.biases[table].any(axis=(1, 2, 3)).sum() if n_levels else 0
        assert (table in found.biases, kept) == (n_levels > 0, n_levels)


@pytest.mark.parametrize(("n_ff", "weights"), [(172, Type.F32), (32, Type.Q8_0)])
def test_neurons_need_not_be_many_whole_steps(tmp_path, elastic, n_ff, weights):
    """With 172 neurons the first step is cut to whole steps; 32 are one kept block of Q8_0."""
    shape = Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=n_ff, n_ctx=512)
    model = write_random_model(tmp_path / "model.gguf", shape, weights)
    code, printed = elastic("prepare", model, "--tokens", 64)
    assert code == 0, printed
    widths = read_elastic(tmp_path / "model.elastic.gguf").tables["searched"]
    assert [one.neurons.tolist() for one in (widths[0], widths[-1])] == [[n_ff], [32]]


def test_importance_is_found_with_a_text(original, tmp_path, elastic):
    (tmp_path / "text.txt").write_text("A boat came back. " * 40)
    model = tmp_path / "model.gguf"
    os.link(original, model)
    printed = elastic("score", model, "--tokens", 64, "--text", tmp_path / "text.txt")[1]
    assert f"tokens of {tmp_path / 'text.txt'}" in printed
    blocks = blocks_of(model)
    by_text = read_scores(tmp_path / "model.scores.npz", blocks, model)
    by_itself = read_scores(original.with_suffix(".scores.npz"), blocks, original)
    assert by_text.calibration.sha256 != by_itself.calibration.sha256
    assert (by_text.neurons != by_itself.neurons).mean() > 0.9
    (tmp_path / "text.txt").write_text("")
    code, printed = elastic("score", model, "--text", tmp_path / "text.txt")
    assert (code, "has 0 tokens, expected at least 16" in printed) == (2, True)


def test_what_matters_is_kept_where_that_is_wanted_or_can_be(original, tmp_path, elastic):
    model, scores = tmp_path / "model.gguf", tmp_path / "elsewhere.npz"
    os.link(original, model)
    (tmp_path / "model.scores.npz.partial").mkdir()  # prevents writing beside the model
    options = "--tokens", 32, "--no-search"
    code, printed = elastic("prepare", model, *options)
    assert (code, "scores are not kept: cannot write" in printed) == (0, True)
    assert "`--scores FILE` keeps them elsewhere" in printed
    code, printed = elastic("prepare", model, *options, "--scores", scores)
    assert (code, f"{scores}: scores by" in printed) == (0, True)
    code, printed = elastic("prepare", model, *options, "--scores", scores)
    assert (code, "tokens, computed earlier" in printed) == (0, True)
    written = scores.read_bytes()
    scores.unlink()
    assert elastic("score", model, "--tokens", 32, "-o", scores)[0] == 0
    assert scores.read_bytes() == written


def test_a_text_has_a_least_length(original, tmp_path, elastic, monkeypatch, capfd):
    with pytest.raises(SystemExit):
        elastic("prepare", original, "--tokens", 5)
    assert "--tokens: expected 32 or more, found" in capfd.readouterr().err
    monkeypatch.setattr(elastic_text, "_LEAST_TEXT", 33)
    code, printed = elastic("score", original, "--tokens", 32, "-o", tmp_path / "x")
    assert (code, "expected at least 33" in printed) == (2, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.progress"]  # the model's text


def test_an_old_option_names_the_new_one(elastic, original, capfd):
    with pytest.raises(SystemExit):
        elastic("prepare", original, "--quantise", "Q4_0")
    assert "this option is now called --quantize" in capfd.readouterr().err


def test_mistakes_are_said(original, folder, tmp_path, elastic):
    prepared, model = folder / "model.elastic.gguf", folder / "model.gguf"
    nowhere, short = "/proc/x", folder / "short.txt"
    short.write_text("Not much, but more than nothing.")
    for args, reason in (
        (("prepare", prepared), "is prepared already"),
        (("prepare", tmp_path / "none.gguf"), "No such file or directory"),
        (("prepare", model, "--text", tmp_path / "x"), "cannot read"),
        (("prepare", model, "--text", short), "tokens, expected at least 16"),
        (("prepare", model, "--scores", tmp_path), "is a folder or a device"),
        (("prepare", model, "--scores", nowhere), "Choose another place with `--scores FILE`"),
        (("prepare", model, "--scores", original.with_suffix(".scores.npz")), "no scores of"),
        (("prepare", model, "-o", model), "cannot replace the file that it is made from"),
        (("prepare", model, "-o", tmp_path / "no" / "x.gguf"), "found no folder"),
        (("prepare", model, "-o", tmp_path), "is a folder or a device"),
        (("prepare", model, "-o", nowhere), "Choose another place with `-o FILE`"),
        (("prepare", model, "-o", tmp_path / ("x" * 250)), "File name too long"),
        (("prepare", model, "--quantize", "Q4_0"), "expected F32, F16 or BF16"),
        (("score", tmp_path), "Is a directory"),
        (("score", model, "-o", nowhere), "Choose another place with `-o FILE`"),
        (("score", model, "-o", model), "cannot replace the file that it is made from"),
        (("restore", prepared, "-o", tmp_path), "is a folder or a device"),
        (("restore", model, "-o", tmp_path / "x"), "is not a prepared file"),
        (("restore", tmp_path / "none", "-o", tmp_path / "x"), "No such file or directory"),
        (("show", model), "is not prepared; `llmaas elastic prepare"),
    ):
        code, printed = elastic(*args)
        assert (code, reason in printed) == (2, True), printed
    assert not list(tmp_path.iterdir())
    assert not list(folder.glob("*partial*"))


def test_sigterm_leaves_the_uniform_file_and_what_was_found(
    original, tmp_path, elastic, monkeypatch
):
    path = tmp_path / "x.gguf"

    def terminated(*_args):
        assert set(read_elastic(path).tables) == {"uniform"}
        os.kill(os.getpid(), signal.SIGTERM)

    def unexpected(*_args):
        raise AssertionError("nobody took the signal")

    monkeypatch.setattr(elastic_preparing, "searched", terminated)
    before = signal.signal(signal.SIGTERM, unexpected)
    try:
        code, printed = elastic("prepare", original, "-o", path, "--tokens", 64)
        assert signal.getsignal(signal.SIGTERM) is unexpected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, "stopped; run the same command again to continue" in printed) == (143, True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.gguf", "x.gguf.progress"}
    assert set(read_elastic(path).tables) == {"uniform"}


KILLED = """
import os, signal, sys
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic import checkpoint
checkpoint._EVERY_S = 0
keep, left = checkpoint.Checkpoint.keep, int(sys.argv[1])
def kept(self, results):
    global left
    keep(self, results)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Checkpoint.keep = kept
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a Q8_0 model of two layers, which is searched within seconds."""
    shape = Shape(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=256, n_ctx=512)
    return write_random_model(tmp_path_factory.mktemp("small") / "model.gguf", shape, Type.Q8_0)


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory):
    """Return the file that one run makes, with scores of its own."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    options = "--tokens", "64", "--scores", f"{folder}/scores.npz", "-o", f"{folder}/x.gguf"
    assert main(["elastic", "prepare", str(small), *options]) == 0
    assert {entry.name for entry in folder.iterdir()} == {"x.gguf", "scores.npz"}
    return folder / "x.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("n_kept", [1, 2, 5, 7, 20])
def test_a_killed_run_goes_on_and_ends_with_the_same_file(
    small, uninterrupted, tmp_path, elastic, n_kept
):
    """It is killed after the text, a window's sums, layers, the uniform file, and some losses."""
    path, scores = tmp_path / "x.gguf", tmp_path / "scores.npz"
    options = "--tokens", 64, "--scores", scores, "-o", path
    command = [sys.executable, "-c", KILLED, n_kept, "elastic", "prepare", small, *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "x.gguf.progress").is_file()
    if path.exists():
        assert set(read_elastic(path).tables) == {"uniform"}
    assert path.exists() == (n_kept > 6)
    code, printed = elastic("prepare", small, *options)
    assert (code, "continuing at step" in printed) == (0, True), printed
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.gguf", "scores.npz"}


def test_what_was_measured_is_not_measured_again(small, tmp_path, elastic, monkeypatch):
    """A run that was stopped late evaluates no width again that it evaluated before."""
    path = tmp_path / "x.gguf"
    options = "--tokens", 64, "--scores", tmp_path / "scores.npz", "-o", path
    n_measured, measure = [], TextLoss.measure

    def stopped(self):
        n_measured.append(1)
        if len(n_measured) == 40:
            raise KeyboardInterrupt
        return measure(self)

    monkeypatch.setattr(TextLoss, "measure", stopped)
    assert elastic("prepare", small, *options)[0] == 130
    elastic("prepare", small, *options)
    n_all = len(n_measured)
    path.unlink()
    (tmp_path / "scores.npz").unlink()
    n_measured[:] = [1] * 40
    elastic("prepare", small, *options)
    assert n_all == len(n_measured) - 40 + 1 + (40 - 1) % 2  # the stopped one, and its first part


PEAK = """
import pathlib, sys
from llmaas_plugins.cli.main import main
code = main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print("peak", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


def peak_bytes(model, folder):
    """Return the peak memory of a preparation without search."""
    options = "--tokens", "32", "--scores", folder / "scores.npz", "-o", folder / "x.gguf"
    command = [sys.executable, "-c", PEAK, "elastic", "prepare", model, "--no-search", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return int(done.stderr.split("peak ")[1]) << 10


@pytest.mark.slow
def test_no_float32_copy_of_the_model_is_made(small, tmp_path):
    """Memory grows with the file, and with one layer in float32."""
    shape = Shape(n_layer=12, n_embd=256, n_head=4, n_head_kv=2, n_ff=3072, n_ctx=512)
    model = write_random_model(tmp_path / "model.gguf", shape, Type.Q8_0)
    n_bytes, layer = model.stat().st_size, 4 * 256 * (3 * 3072 + 3 * 256)
    for folder in ("few", "many"):
        (tmp_path / folder).mkdir()
    more = peak_bytes(model, tmp_path / "many") - peak_bytes(small, tmp_path / "few")
    of_float32 = 4 * n_bytes * 32 / 34
    assert n_bytes / 4 < more < n_bytes + layer + (24 << 20) < of_float32


def test_another_model_begins_anew(small, original, tmp_path, elastic, monkeypatch):
    path, scores = tmp_path / "x.gguf", tmp_path / "scores.npz"
    options = "--tokens", 64, "--scores", scores, "-o", path
    monkeypatch.setattr(elastic_preparing, "searched", lambda *_: os.kill(os.getpid(), 15))
    assert elastic("prepare", small, *options)[0] == 143
    monkeypatch.undo()
    scores.unlink()
    code, printed = elastic("prepare", original, *options, "--no-search")
    assert (code, "continuing" in printed) == (0, False)
    assert blocks_of(path) == blocks_of(original)


def test_steps_are_announced_and_a_dry_run_writes_nothing(original, tmp_path, elastic):
    path = tmp_path / "x.gguf"
    options = "--tokens", 64, "--scores", tmp_path / "scores.npz", "-o", path
    code, printed = elastic("prepare", original, *options, "--dry-run")
    lines = printed.splitlines()
    assert (code, list(tmp_path.iterdir())) == (0, [])
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == [f"step {n} of 5" for n in range(1, 6)]
    assert all(" about " in line for line in steps)
    assert "measured" in printed or "estimated from a probe" in printed
    assert any(line.startswith("memory: ") and "disk: " in line for line in lines)
    code, printed = elastic("prepare", original, *options, "--dry-run", "--json")
    report = json.loads(printed)
    assert len(report["steps"]) == 5
    assert min(step["seconds"] for step in report["steps"]) > 0
    assert report["disk_bytes"] == 2 * original.stat().st_size
    code, printed = elastic("prepare", original, *options, "--no-search", "--json")
    report = json.loads(printed)
    assert (report["path"], report["n_bytes"]) == (str(path), path.stat().st_size)
    assert list(report["tables"]) == ["uniform"]


def test_other_threads_leave_signals_alone():
    done = []

    def run():
        with stoppable("then"):
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]


def test_every_type_that_can_be_quantized_to_is_offered():
    assert set(elastic_prepare._TYPES) == set(WEIGHTS)
