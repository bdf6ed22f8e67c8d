"""``llmaas elastic``: levels that also cut keys and values."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import logits_of, scores_of
from gguf import GGMLQuantizationType as Type

from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.scores import scores_path, write_scores
from llmaas_plugins.elastic.units import blocks_of

CUT = "--cut-keys-values"
SHAPE = Shape(n_layer=2, n_embd=128, n_head=4, n_head_kv=4, n_ff=352, n_ctx=512)
"""A small Llama-2-7B: no grouped queries, and 2.7 times as many neurons as channels."""


def scored(path, shape):
    """Write a random model with scores, which need no text."""
    write_random_model(path, shape, Type.Q8_0)
    scores = replace(scores_of(blocks_of(path)), layers=np.arange(2.0))
    write_scores(scores_path(path), scores, path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return scored(tmp_path_factory.mktemp("ungrouped") / "model.gguf", SHAPE)


def test_a_model_without_grouped_queries_is_told_what_its_levels_are(elastic, model, tmp_path):
    """With whole keys and values, 20 % is 33 % of the blocks in Llama-2-7B."""
    options = "-o", tmp_path / "x.gguf", "--dry-run", "--no-search"
    line = "keys and values stay whole: level 0.2 computes with 33 % of the blocks' bytes"
    code, printed = elastic("prepare", model, *options)
    assert (code, [each for each in printed.splitlines() if "keys and values" in each]) == (
        0,
        [f"{line} (--cut-keys-values cuts them, too)."],
    )
    assert "keys and values" not in elastic("prepare", model, *options, CUT)[1]
    grouped = scored(tmp_path / "grouped.gguf", replace(SHAPE, n_head_kv=2))
    assert "keys and values" not in elastic("prepare", grouped, *options)[1]


def test_a_file_with_cut_keys_and_values(elastic, model, tmp_path):
    paths = [tmp_path / name for name in ("whole.gguf", "cut.gguf")]
    reports, printed = [], []
    for path, options in zip(paths, ((), (CUT,)), strict=True):
        arguments = "prepare", model, "-o", path, "--no-search", "--keep-blocks", *options
        assert elastic(*arguments)[0] == 0
        reports.append(json.loads(elastic("show", path, "--json")[1]))
        printed.append(elastic("show", path)[1])
    assert [one["cuts_keys_values"] for one in reports] == [False, True]
    whole, cut = ([one["tables"]["uniform"]["levels"] for one in reports][i] for i in (0, 1))
    for before, after in zip(whole, cut, strict=True):
        assert after["computed_share"] == after["share"]
        assert before["computed_share"] > before["share"] or before["level"] == 1
    assert "keys and values: whole at every level" in printed[0]
    assert "keys and values: cut with their groups; a wider level reads zeros" in printed[1]
    assert elastic("restore", paths[1], "-o", tmp_path / "again.gguf")[0] == 0
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()
    expected = logits_of(model)
    assert np.abs(logits_of(paths[1]) - expected).max() < 0.05 * expected.std()


def test_the_option_goes_with_quantization(elastic, original, tmp_path):
    """The model has biases of keys and values."""
    path = tmp_path / "small.gguf"
    code, _ = elastic("prepare", original, "-o", path, "--quantize", "Q8_0", "--no-search", CUT)
    assert code == 0
    assert read_elastic(path).blocks == blocks_of(path, cuts_keys_values=True)


@pytest.mark.slow
def test_widths_are_searched_for(elastic, model, tmp_path):
    path = tmp_path / "searched.gguf"
    assert elastic("prepare", model, "-o", path, "--tokens", 64, CUT)[0] == 0
    found = read_elastic(path)
    assert set(found.tables) == {"uniform", "searched"}
    for level, widths in zip(found.levels[:7], found.tables["searched"], strict=False):
        assert found.blocks.share(widths) <= level + 1e-9


def test_progress_of_whole_keys_and_values_is_not_gone_on_with(elastic, model, tmp_path):
    path, options = tmp_path / "x.gguf", ("-o", tmp_path / "x.gguf", "--no-search")
    elastic("prepare", model, *options)
    shutil.copy(path, tmp_path / "whole.gguf")
    elastic("prepare", model, *options, CUT)
    assert read_elastic(path).blocks.cuts_keys_values
    assert not read_elastic(tmp_path / "whole.gguf").blocks.cuts_keys_values
