"""Importance scores: computed without gradients, and kept in files that are never trusted."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damages import FOREIGN, ODD, content, each_told
from elastic_models import scores_of
from gguf import GGUFReader, quants
from llama_cpp import Llama

from llmaas_hooks import ConfigError
from llmaas_plugins import activate
from llmaas_plugins.elastic import fluctuation
from llmaas_plugins.elastic.checkpoint import Checkpoint
from llmaas_plugins.elastic.fluctuation import (
    ChannelMoments,
    Watcher,
    calibration_of,
    fluctuation_scores,
)
from llmaas_plugins.elastic.layer_losses import layer_losses
from llmaas_plugins.elastic.probing import Prober
from llmaas_plugins.elastic.scores import read_scores, write_scores
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.forward import Evaluator
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.model.loading import loaded

TEXT = np.random.default_rng(0).integers(300, 2000, 60).astype(np.int32)


@pytest.fixture(scope="module")
def blocks(reference_model):
    return blocks_of(reference_model)


@pytest.fixture
def scores(blocks):
    return replace(scores_of(blocks), layers=np.linspace(-1, 5, blocks.n_layers))


@pytest.fixture
def path(scores, reference_model, tmp_path):
    write_scores(tmp_path / "scores.npz", scores, reference_model)
    return tmp_path / "scores.npz"


def test_scores_are_read_as_they_were_written(path, scores, blocks, reference_model):
    found = read_scores(path, blocks, reference_model)
    for name in ("groups", "neurons", "layers"):
        np.testing.assert_array_equal(getattr(found, name), getattr(scores, name))
    assert found.calibration == scores.calibration
    assert [entry.name for entry in path.parent.iterdir()] == ["scores.npz"]


def test_scores_of_another_model_are_refused(path, blocks, reference_model, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(reference_model.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match="has the scores of another model"):
        read_scores(path, blocks, other)


def about(**changed):
    known = {"version": 1, "model": "", "sha256": "", "seed": 0, "n_tokens": 0, "method": ""}
    return np.frombuffer(json.dumps(known | changed).encode(), np.uint8)


def rewritten(path, **changed):
    with np.load(path) as file:
        arrays = dict(file.items()) | changed
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"groups": np.zeros((8, 3))}, "groups are not"),
        ({"neurons": np.full((8, 768), np.nan)}, "neurons are not"),
        ({"layers": np.zeros(8, np.float32)}, "layers are not"),
        ({"layers": None}, "has no layers"),
        ({"about": None}, "has no about"),
        ({"about": np.frombuffer(b'{"version": 2}', np.uint8)}, "is damaged"),
        pytest.param({"about": about(method="x" * 65)}, "at most 64", id="long method"),
        ({"about": np.zeros(1 << 20, np.uint8)}, "about.npy is unknown or too large"),
        ({"groups": np.zeros((800, 4))}, "groups.npy is unknown or too large"),
        ({"more": np.zeros(2000)}, "more.npy is unknown or too large"),
        ({"groups": np.array([["x"] * 4] * 8)}, "groups are not"),
        ({"groups": np.array([None] * 8)}, "is damaged"),
    ],
    ids=str,
)
def test_hostile_files_are_refused(path, blocks, reference_model, changed, reason):
    with pytest.raises(ConfigError, match=reason):
        read_scores(rewritten(path, **changed), blocks, reference_model)


OTHERS = {"start of an archive": content(b"PK\x03\x04"), "pickle": content(b"\x80\x04N.")}


@each_told(
    {
        r"has no scores of .*, or is damaged": {**FOREIGN, **OTHERS},
        "found no file": {**ODD, "missing": Path.unlink},
    }
)
def test_what_is_no_file_of_scores_is_refused(path, blocks, reference_model, damage, message):
    damage(path)
    with pytest.raises(ConfigError, match=message):
        read_scores(path, blocks, reference_model)


def test_an_array_that_claims_to_be_huge_is_refused(path, blocks, reference_model):
    header = io.BytesIO()
    claim = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 4)}
    np.lib.format.write_array_header_1_0(header, claim)
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, header.getvalue() if name == "groups.npy" else old.read(name))
    with pytest.raises(ConfigError, match="is damaged"):
        read_scores(path, blocks, reference_model)


def patched(content, at, value):
    """Replace a number in an archive's first entry, and in the copy before its data."""
    for first in (at + content.index(b"PK\x01\x02"), at - 2):
        content = content[:first] + value.to_bytes(2, "little") + content[first + 2 :]
    return content


def with_header(text):
    """Return an archive whose groups have this text for a header."""
    written = io.BytesIO()
    head = struct.pack("<6sBBH", b"\x93NUMPY", 1, 0, len(text)) + text
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("groups.npy", head)
    return written.getvalue()


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: patched(content, 8, 1),
        lambda content: patched(content, 6, 200),
        lambda content: patched(content, 10, 97),
        lambda content: patched(content, 8, 32),
        lambda content: patched(content.replace(b"\x93NUMPY", b"\xffNUMPY", 1), 10, 8),
        lambda _: with_header(b"{'descr': (\n"),
        lambda _: with_header(b"{1: 1, 'descr': 1}\n"),
        lambda _: with_header(b"{'descr': (), 'fortran_order': False, 'shape': ()}\n"),
    ],
    ids=["encrypted", "later", "unknown method", "patch", "no deflate", "open", "keys", "type"],
)
def test_whatever_is_wrong_with_an_archive_it_is_damaged(path, blocks, reference_model, damaged):
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"is damaged.*`llmaas elastic score .*` writes new ones"):
        read_scores(path, blocks, reference_model)


def test_fluctuation_is_variance_times_the_norms_of_columns(reference_model, blocks):
    rng = np.random.default_rng(0)
    heads, neurons = rng.random((8, 256)), rng.random((8, 768))
    moments = ChannelMoments(heads * 0, heads, neurons * 0, neurons)
    calibration = calibration_of(TEXT, 0, 60, "fluctuation")
    found = fluctuation_scores(reference_model, blocks, moments, calibration)
    tensors = {tensor.name: tensor for tensor in GGUFReader(reference_model).tensors}

    def norms(name):
        tensor = tensors[name]
        return (quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64) ** 2).sum(0)

    expected = [
        (heads[2] * norms("blk.2.attn_output.weight"))[64 * g :][:64].sum() for g in range(4)
    ]
    np.testing.assert_allclose(found.groups[2], expected, rtol=1e-6)
    np.testing.assert_allclose(
        found.neurons[5], neurons[5] * norms("blk.5.ffn_down.weight"), rtol=1e-6
    )
    assert found.calibration.n_tokens == 60


class Stopping(Watcher):
    """Watcher whose evaluator stops the run while a window's moments are added."""

    def __init__(self, blocks, monkeypatch, n_reads):
        super().__init__(blocks)
        self.n_reads = 0

        def add(sums, *moments):
            for each in moments:
                read = each.read

                def stopping(layer, read=read):
                    self.n_reads += 1
                    if self.n_reads == n_reads:
                        raise KeyboardInterrupt
                    return read(layer)

                each.read = stopping
            added(sums, *moments)

        added = fluctuation._Sums.add
        monkeypatch.setattr(fluctuation._Sums, "add", add)


@contextlib.contextmanager
def watched(path, watcher):
    """Yield an evaluator of a model that a watcher observes, and windows."""
    with (
        activate({"on_error": "raise"}, {"watcher": watcher}),
        loaded(path) as model,
        Evaluator(model.model, 1) as evaluator,
    ):
        yield evaluator, evaluator.cut(TEXT, 21)


@pytest.mark.parametrize("n_reads", [1, 20, 24, 40])
def test_sums_of_a_window_are_kept_whole_or_not_at_all(
    reference_model, blocks, monkeypatch, tmp_path, n_reads
):
    """A window has 16 reads; the signal comes while the first, second or third is added."""
    watcher = Watcher(blocks)
    with watched(reference_model, watcher) as (evaluator, windows):
        assert len(windows) == 3
        expected = watcher.moments(evaluator, windows)
    with monkeypatch.context() as patched:
        watcher = Stopping(blocks, patched, n_reads)
        with (
            watched(reference_model, watcher) as (evaluator, windows),
            pytest.raises(KeyboardInterrupt),
            Checkpoint(tmp_path / "progress", "") as checkpoint,
        ):
            watcher.moments(evaluator, windows, checkpoint=checkpoint)
    watcher = Watcher(blocks)
    with (
        watched(reference_model, watcher) as (evaluator, windows),
        Checkpoint(tmp_path / "progress", "") as checkpoint,
    ):
        found = watcher.moments(evaluator, windows, checkpoint=checkpoint)
    for name in ("head_means", "head_variances", "neuron_means", "neuron_variances"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_layers_loss_is_that_of_the_model_without_it(reference_model, blocks, tmp_path):
    prober = Prober(blocks)
    with (
        activate({"on_error": "raise"}, {"prober": prober}),
        loaded(reference_model) as model,
        Evaluator(model.model, 1) as evaluator,
    ):
        (tokens,) = evaluator.windows(TEXT, 60)
        losses = layer_losses(prober, evaluator, blocks, [tokens])
    assert losses.shape == (8,)
    full = surprise(reference_model, tokens)
    for layer in (1, 6):
        found = surprise(without(reference_model, layer, tmp_path / "without.gguf"), tokens)
        assert losses[layer] == pytest.approx(found - full, abs=0.02 * abs(found))


def without(source, layer, path):
    """Write the model with a layer that adds nothing; zero bytes are zeros in any type."""
    shutil.copy(source, path)
    path.chmod(0o644)
    tensors = read_header(source).tensors
    with path.open("r+b") as file:
        for matrix in ("attn_output", "ffn_down"):
            place = tensors[f"blk.{layer}.{matrix}.weight"]
            file.seek(place.at)
            file.write(bytes(place.n_bytes))
    return path


def surprise(path, tokens):
    """Return vanilla's loss in nats per token."""
    llama = Llama(str(path), n_ctx=128, logits_all=True, n_threads=1, verbose=False)
    with contextlib.closing(llama):
        llama.eval(tokens.tolist())
        logits = llama.scores[: len(tokens) - 1].astype(np.float64)
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -chances[np.arange(len(chances)), tokens[1:]].mean()


def test_windows_have_one_length(reference_model):
    text = np.arange(300, 1800, dtype=np.int32)
    with loaded(reference_model) as model, Evaluator(model.model, 1) as evaluator:
        n_start = 512 - 511
        whole = evaluator.windows(text, 1500)
        assert whole.shape == (3, 1500 - 2 * 511 + n_start)
        np.testing.assert_array_equal(whole[1, n_start:], text[511:][: whole.shape[1] - n_start])
        assert evaluator.windows(text[:1100], 1100).shape == (2, 512)
        assert evaluator.windows(text[:7], 1100).shape == (1, 8)
        said = evaluator.say(50)
    assert 40 <= len(said) <= 50
    assert said.dtype == np.int32
