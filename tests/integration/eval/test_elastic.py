"""The study of elastic models: level figures match the engine, and comparisons are fair."""

from __future__ import annotations

import json

import numpy as np
import pytest
from elastic_models import logits_of
from gguf import GGUFReader

from llmaas_eval.data import packaged_documents
from llmaas_eval.elastic.cli import main
from llmaas_eval.elastic.cutting import even_widths, write_cut
from llmaas_eval.elastic.engine import Variant, readings
from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.elastic.ungrouped import write_ungrouped
from llmaas_eval.weights import f16_copy
from llmaas_plugins.elastic.units import Calibration, Scores, all_units, blocks_of, without_layers

KIND = "packaged chats"


@pytest.fixture(scope="module")
def source(reference_model, tmp_path_factory):
    return f16_copy(reference_model, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def scores(source):
    blocks = blocks_of(source)
    groups, neurons = np.ones((8, blocks.n_groups)), np.ones((8, blocks.n_ff))
    return Scores(groups, neurons, Calibration("", 0, 0, "none"), np.arange(8.0))


@pytest.fixture(scope="module")
def prepared(source, scores):
    return write_uniform(source, source.with_stem("prepared"), scores)


@pytest.fixture(scope="module")
def windows(source):
    return windows_of(source, packaged_documents(), 2, 48)


@pytest.mark.slow
def test_windows_are_spread_over_the_text(source, windows):
    every = windows_of(source, packaged_documents(), 1000, 48)
    assert len(every) > 50
    assert np.array_equal(windows, every[[0, -1]])
    with pytest.raises(ValueError, match="shorter"):
        windows_of(source, ["too short"], 1, 48)


@pytest.mark.slow
def test_a_level_reads_as_a_file_cut_to_it(source, windows, tmp_path):
    blocks = blocks_of(source)
    widths = even_widths(blocks, 0.6)
    assert 0.53 < blocks.share(widths) <= 0.6  # a step is 7 %
    cut = write_cut(source, widths, tmp_path / "cut.gguf")
    assert len(GGUFReader(cut).tensors) == len(GGUFReader(source).tensors)
    (expected,) = readings(source, Variant(cut), windows)
    levels = [all_units(blocks), widths, without_layers(blocks, [2])]
    full, level, removed = readings(source, Variant(source, blocks, levels), windows)
    assert level.kl == pytest.approx(expected.kl, rel=1e-4)
    assert level.nats == pytest.approx(expected.nats, rel=1e-5)
    assert full.kl.max() < 1e-6
    assert full.same.tolist() == [1, 1]
    assert 0 < removed.kl.mean() < level.kl.mean()


@pytest.mark.slow
def test_the_study_compares_as_many_bytes(source, prepared, capsys):
    methods = ["random", "magnitude", "fluctuation", "mean biases"]
    found = studied(capsys, source, prepared, "--parts", "levels", "types", "--methods", *methods)
    rows = {(row["method"], row["level"]): row for row in found["levels"]}
    methods = {name for name, _ in rows} - {"full"}
    others = {"random", "random, best", "magnitude", "fluctuation", "mean biases, uniform"}
    assert methods == {"uniform"} | others
    for level in (0.8, 0.5):
        (share,) = {rows[name, level]["share"] for name in methods}
        assert level - 0.05 < share <= level
        assert rows["random, best", level]["perplexity"] < rows["random", level]["perplexity"]
    assert 0 < sum(rows["uniform", 0.8]["kl"]) < sum(rows["uniform", 0.5]["kl"])
    types = {(row["method"], row["level"]): sum(row["kl"]) for row in found["types"]}
    assert types["F16", 1.0] < types["Q8_0", 1.0] < types["Q8_0", 0.8]
    assert types["F16", 0.5] == sum(rows["uniform", 0.5]["kl"])
    assert found["layers"] == found["calibration"] == []


@pytest.mark.slow
def test_the_study_in_tables_and_pictures(source, prepared, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    what = ["--parts", "layers", "--pictures", str(tmp_path)]
    assert main([*quick(source, prepared), *what]) == 0
    assert "| 7 |" in capsys.readouterr().out
    assert (tmp_path / "elastic-layers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_contexts_change_their_level_on_the_way(source, prepared, capsys):
    found = studied(capsys, source, prepared, "--parts", "continued")["continued"]
    kl = {(row["method"], row["level"]): sum(row["kl"]) for row in found}
    assert kl["from 100%", 1.0] == 0
    assert 0 < kl["from 50%", 1.0] < kl["from 100%", 0.5]
    assert kl["from 50%", 0.5] != kl["from 100%", 0.5]


@pytest.mark.slow
def test_keys_and_values_that_are_cut_cost_contexts_that_change_their_level(
    source, prepared, scores, capsys
):
    cut = write_uniform(source, source.with_stem("cut"), scores, cuts_keys_values=True)
    found = {
        path: studied(capsys, source, path, "--parts", "continued") for path in (prepared, cut)
    }
    assert found[prepared]["always_computed"] > 0 == found[cut]["always_computed"]
    kl = {
        path: {(row["method"], row["level"]): sum(row["kl"]) for row in one["continued"]}
        for path, one in found.items()
    }
    assert kl[cut]["from 50%", 1.0] > kl[prepared]["from 50%", 1.0]
    assert kl[cut]["from 100%", 1.0] == 0


def test_a_model_without_grouped_queries_says_the_same(source, tmp_path):
    path = write_ungrouped(source, tmp_path / "ungrouped.gguf")
    blocks = blocks_of(path)
    assert (blocks.n_groups, blocks.heads_per_group) == (8, 1)
    np.testing.assert_allclose(logits_of(path), logits_of(source), atol=1e-3)


def test_a_kind_of_text_is_compared_with_itself(source, prepared, capsys):
    found = studied(capsys, source, prepared, "--parts", "kinds")["kinds"]
    rows = {(row["method"], row["level"]): row for row in found}
    levels = {(f"uniform: {KIND}", 0.8), (f"uniform: {KIND}", 0.5)}
    assert set(rows) == {("full", 1.0), (f"full: {KIND}", 1.0), *levels}
    assert rows[f"full: {KIND}", 1.0]["nats"] == rows["full", 1.0]["nats"]
    assert 0 < sum(rows[f"uniform: {KIND}", 0.8]["kl"]) < sum(rows[f"uniform: {KIND}", 0.5]["kl"])


def studied(capsys, source, prepared, *what):
    assert main([*quick(source, prepared), *what, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def quick(source, prepared):
    arguments = "--model", source, "--prepared", prepared, "--quick", "--levels", 0.8, 0.5
    return list(map(str, arguments))
