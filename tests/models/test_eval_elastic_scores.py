"""Other methods' scores of units and layers, as their papers define them."""

from __future__ import annotations

import numpy as np
import pytest
from families import write_family
from gguf import GGMLQuantizationType

from llmaas_eval.elastic import scores
from llmaas_plugins.elastic.units import blocks_of

WINDOWS = np.random.default_rng(0).integers(3, 4000, (2, 24))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the path of a model with two layers."""
    folder = tmp_path_factory.mktemp("scores")
    return write_family("qwen2", folder / "model.gguf", weights=GGMLQuantizationType.F32)


def test_random_ones_are_their_seeds(path):
    blocks = blocks_of(path)
    one, same, other = (scores.random_scores(blocks, seed) for seed in (1, 1, 2))
    assert (one.groups.shape, one.neurons.shape) == ((2, 2), (2, 512))
    assert (one.neurons == same.neurons).all()
    assert (one.neurons != other.neurons).any()
    assert one.calibration.seed == 1


def test_magnitude_is_the_norm_of_all_of_a_unit(path, monkeypatch):
    read = scores.read_weights

    def changed(reader):
        weights = read(reader)
        weights["blk.0.attn_k.weight"][64:] = 9
        weights["blk.1.ffn_up.weight"][7] = 3
        weights["blk.1.ffn_gate.weight"][7] = weights["blk.1.ffn_down.weight"][:, 7] = 0
        return weights

    monkeypatch.setattr(scores, "read_weights", changed)
    found = scores.magnitude_scores(path)
    assert found.groups[0].argmax() == 1
    assert found.neurons[1, 7] == pytest.approx(3 * 256**0.5)
    assert found.neurons[1].argmax() == 7
