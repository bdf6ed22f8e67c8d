"""Other methods' scores that need torch, as their papers define them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llmaas_eval.elastic import scores
from llmaas_eval.families import write_family

pytest.importorskip("torch", reason="make test-train installs it")
torch_model = pytest.importorskip("llmaas_plugins.elastic.torch_model")
gradients = pytest.importorskip("llmaas_plugins.elastic.gradients")
laco = pytest.importorskip("llmaas_eval.elastic.laco")

WINDOWS = np.random.default_rng(0).integers(3, 4000, (2, 24))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the path of a model with two layers."""
    folder = tmp_path_factory.mktemp("scores")
    return write_family("qwen2", folder / "model.gguf", weights=GGMLQuantizationType.F32)


@pytest.fixture
def change(monkeypatch):
    """Give layers other weights."""
    read = torch_model.Decoder.weights

    def change(edit):
        def weights(self, layer):
            found = read(self, layer)
            edit(layer, found)
            return found

        monkeypatch.setattr(torch_model.Decoder, "weights", weights)

    return change


def test_llm_pruners_units_count_each_of_their_weights(path, change):
    def edit(_layer, weights):
        weights["attn_output.weight"][:, :128] *= 1e-3
        weights["attn_v.weight"][:64] *= 1e-3
        weights["ffn_down.weight"][:, 1::2] *= 1e-3

    change(edit)
    found = scores.llm_pruner_scores(path, WINDOWS)
    assert (found.groups[:, 0] < 0.1 * found.groups[:, 1]).all()
    assert (np.median(found.neurons[:, 1::2], 1) < 0.1 * np.median(found.neurons[:, ::2], 1)).all()
    assert found.calibration.n_tokens == WINDOWS.size


def test_llm_pruner_takes_sizes_of_sums_over_the_text(path, change):
    sums = {}
    decoder = torch_model.Decoder(path)
    for terms in gradients.loss_terms(decoder, WINDOWS.astype(np.int32), of_weights=True):
        if terms.layer == 1:
            for name, weight in terms.weights.items():
                sums[name] = sums.get(name, 0) + (weight * weight.grad).detach().double().numpy()
    rows = sum(np.abs(sums[f"{name}.weight"])[5].sum() for name in ("ffn_gate", "ffn_up"))
    expected = rows + np.abs(sums["ffn_down.weight"])[:, 5].sum()
    found = scores.llm_pruner_scores(path, WINDOWS)
    assert found.neurons[1, 5] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("idle", [0, 1])
def test_shortgpt_drops_first_what_changes_its_input_least(path, change, idle):
    def edit(layer, weights):
        weights["attn_output.weight"] *= 1 if layer == idle else 10
        weights["ffn_down.weight"] *= layer != idle

    change(edit)
    assert scores.layers_to_drop(path, WINDOWS) == [idle, 1 - idle]


def test_laco_adds_what_merged_layers_differ_by(tmp_path):
    source = write_family("gemma3", tmp_path / "source.gguf", weights=GGMLQuantizationType.F16)
    before = torch_model.Decoder(source)
    merged = torch_model.Decoder(laco.write_merged(source, tmp_path / "one.gguf", 1, WINDOWS))
    assert merged.blocks.n_layers == 1
    first, second, third = (before.weights(layer) for layer in range(3))
    for name, weight in merged.weights(0).items():
        expected = second[name] + third[name] - first[name]
        np.testing.assert_allclose(weight, expected, atol=1e-2)
    with pytest.raises(ValueError, match="3 layers wanted, expected at least 1 and under 3"):
        laco.write_merged(source, tmp_path / "no.gguf", 3, WINDOWS)


def test_laco_merges_where_the_output_stays_similar():
    def similarity(merges):
        return 0.9 if merges[-1][0] == 2 else 0.5

    assert laco._merges(8, 6, 0.8, similarity) == ((2, 2),)
    assert laco._merges(8, 5, 0.8, similarity) == ()
    assert laco._merges(8, 5, 0.4, similarity) == ((5, 2), (3, 1))
    assert laco._merges(8, 1, 0.4, similarity) == ((5, 2), (3, 2), (1, 2), (0, 1))
