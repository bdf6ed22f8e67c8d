"""Importance by gradients: computed layer by layer, it equals torch's for the whole model."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llmaas_eval.families import write_family
from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.checkpoint import Checkpoint
from llmaas_plugins.elastic.units import Calibration

torch = pytest.importorskip("torch", reason="make test-train installs it")
torch_model = pytest.importorskip("llmaas_plugins.elastic.torch_model")
gradients = pytest.importorskip("llmaas_plugins.elastic.gradients")

F32 = GGMLQuantizationType.F32
WINDOWS = np.random.default_rng(0).integers(3, 4000, (3, 40), np.int32)


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    return write_family(request.param, folder / "model.gguf", weights=F32)


def salience(path):
    """Return gradient times weight by layer and matrix, from one graph of all weights."""
    decoder = torch_model.Decoder(path)
    layers = [decoder.weights(layer) for layer in range(decoder.blocks.n_layers)]
    for weight in (weight for layer in layers for weight in layer.values()):
        weight.requires_grad_()
    for window in WINDOWS:
        x = decoder.embed(window[None, :-1])[0]
        for i, weights in enumerate(layers):
            x = decoder.block(i, weights, x)
        targets = torch.from_numpy(window[1:].astype(np.int64))
        torch.nn.functional.cross_entropy(decoder.logits(x), targets, reduction="sum").backward()
    return [
        {name: (weight * weight.grad).detach().numpy() for name, weight in weights.items()}
        for weights in layers
    ]


def test_the_papers_score_is_gradient_times_weight_of_a_units_columns(path, monkeypatch):
    monkeypatch.setattr(gradients, "_KEPT_BYTES", 1 << 18)  # weights are read again for each window
    monkeypatch.setattr(torch_model, "_CHUNK", 256 * 1000)
    shares = []
    found = gradients.gradient_scores(path, WINDOWS, method="taylor", progress=shares.append)
    for i, expected in enumerate(salience(path)):
        groups = expected["attn_output.weight"].sum(0).reshape(len(found.groups[i]), -1).sum(1)
        neurons = expected["ffn_down.weight"].sum(0)
        np.testing.assert_allclose(found.groups[i], abs(groups), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found.neurons[i], abs(neurons), rtol=1e-3, atol=1e-5)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_ours_is_squares_of_all_tokens_but_each_windows_first(path):
    found = gradients.gradient_scores(path, WINDOWS)
    groups, neurons = np.zeros_like(found.groups), np.zeros_like(found.neurons)
    for terms in gradients.loss_terms(torch_model.Decoder(path), WINDOWS):
        groups[terms.layer] += (terms.groups[1:].numpy().astype(float) ** 2).sum(0)
        neurons[terms.layer] += (terms.neurons[1:].numpy().astype(float) ** 2).sum(0)
    np.testing.assert_allclose(found.groups, groups)
    np.testing.assert_allclose(found.neurons, neurons)


def test_gradients_of_weights_are_there_on_request(path):
    decoder = torch_model.Decoder(path)
    found = [{} for _ in range(decoder.blocks.n_layers)]
    for terms in gradients.loss_terms(decoder, WINDOWS, of_weights=True):
        for name, weight in terms.weights.items():
            change = (weight * weight.grad).detach().numpy()
            found[terms.layer][name] = found[terms.layer].get(name, 0) + change
    for layer, expected in zip(found, salience(path), strict=True):
        assert layer.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(layer[name], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_scores(path, monkeypatch, tmp_path):
    monkeypatch.setattr(gradients, "_KEPT_BYTES", 1)  # one window at once
    expected = gradients.gradient_scores(path, WINDOWS)
    blocks, shares = torch_model.Decoder.block, []

    def stopped(self, *args):
        shares.append(args[0])
        if len(shares) == 3 * 2 * self.blocks.n_layers - 1:  # in the last window
            raise KeyboardInterrupt
        return blocks(self, *args)

    monkeypatch.setattr(torch_model.Decoder, "block", stopped)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path / "progress", "") as checkpoint:
        gradients.gradient_scores(path, WINDOWS, checkpoint=checkpoint)
    n_before = len(shares)
    with Checkpoint(tmp_path / "progress", "") as checkpoint:
        found = gradients.gradient_scores(path, WINDOWS, checkpoint=checkpoint)
    assert len(shares) - n_before == 2 * torch_model.Decoder(path).blocks.n_layers  # one window
    np.testing.assert_array_equal(found.groups, expected.groups)
    np.testing.assert_array_equal(found.neurons, expected.neurons)


def test_what_they_were_found_with_is_kept(path):
    found = gradients.gradient_scores(path, WINDOWS, seed=7)
    digest = hashlib.sha256(WINDOWS.astype("<i4").tobytes()).hexdigest()
    assert found.calibration == Calibration(digest, 7, WINDOWS.size, "fisher")


@pytest.mark.parametrize("path", ["qwen2"], indirect=True)  # gemma3 normalizes the units' outputs
@pytest.mark.parametrize("method", sorted(gradients.METHODS))
def test_units_that_hardly_do_anything_score_least(path, monkeypatch, method):
    read = torch_model.Decoder.weights

    def faint(self, layer):
        weights = read(self, layer)
        weights["attn_output.weight"][:, :128] *= 1e-3
        weights["ffn_down.weight"][:, ::2] *= 1e-3
        return weights

    monkeypatch.setattr(torch_model.Decoder, "weights", faint)
    found = gradients.gradient_scores(path, WINDOWS, method=method)
    assert (found.groups[:, 0] < found.groups[:, 1]).all()
    assert (np.median(found.neurons[:, ::2], 1) < 0.1 * np.median(found.neurons[:, 1::2], 1)).all()


@pytest.mark.parametrize(
    ("windows", "method", "message"),
    [
        (WINDOWS, "magnitude", "magnitude.*fisher, taylor"),
        (WINDOWS[:0], "taylor", r"\(0, 40\)"),
        (WINDOWS[:, :2], "taylor", r"\(3, 2\), expected .* 3 tokens"),
    ],
)
def test_refusals(path, windows, method, message):
    with pytest.raises(ConfigError, match=message):
        gradients.gradient_scores(path, windows, method=method)
