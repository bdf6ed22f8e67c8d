"""``llmaas elastic`` as used by somebody who wants a smaller version of a model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import logits_of
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.cli.elastic import estimates
from llmaas_plugins.cli.elastic import prepare as elastic_prepare
from llmaas_plugins.cli.elastic import text as elastic_text
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.metadata import order_in, read_elastic
from llmaas_plugins.elastic.scores import read_scores
from llmaas_plugins.elastic.uniform import anchors_of
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.model.quantize import WEIGHTS, quantize


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


@pytest.mark.slow
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
    difference = np.sqrt(np.mean((logits_of(path) - expected) ** 2))
    assert difference < 0.02 * expected.std()
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


@pytest.mark.parametrize("weights", ["Q4_K", "Q6_K"])
def test_a_model_in_a_k_type_is_prepared_as_it_is(tmp_path, elastic, weights):
    """Python has no quantizer for these types, and nothing of such a model is quantized again."""
    shape = Shape(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_ctx=512)
    source = write_random_model(tmp_path / "f16.gguf", shape, Type.F16)
    model = quantize(source, tmp_path / "model.gguf", weights)
    code, printed = elastic("prepare", model, "--tokens", 64, "--no-search")
    assert code == 0, printed
    path, again = tmp_path / "model.elastic.gguf", tmp_path / "again.gguf"
    assert elastic("restore", path, "-o", again)[0] == 0
    assert again.read_bytes() == model.read_bytes()


def test_the_probe_of_the_machine_has_progress(original, tmp_path, elastic, monkeypatch):
    bars = []

    def progress_bar(what, unit, total):
        bars.append(tqdm(desc=what, unit=unit, total=total, file=io.StringIO()))
        return bars[-1]

    monkeypatch.setattr(estimates, "progress_bar", progress_bar)
    options = "-o", tmp_path / "x.gguf", "--dry-run", "--no-search"
    assert elastic("prepare", original, *options)[0] == 0
    (bar,) = bars
    assert bar.n == bar.total > 4 * estimates.N_PROBED


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
