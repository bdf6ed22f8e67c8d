"""A model with reordered units gives the same results in stock llama.cpp as before (§3.2)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import logits_of, scores_of, shuffled, write
from families import write_family
from gguf import GGMLQuantizationType

from llmaas_eval.families import FAMILIES
from llmaas_hooks import ConfigError
from llmaas_plugins.elastic import units
from llmaas_plugins.elastic.prepared_file import restore, write_reordered
from llmaas_plugins.elastic.reordering import Order, order_by
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.quantize import quantize

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
SERVED = [*units.FAMILIES]
QUANTIZED = ("F16", "Q8_0", "Q4_0", "Q4_K")


@pytest.fixture(scope="module", autouse=True)
def _biased():
    """Return a llama with all biases that llama.cpp supports in this family."""
    family = FAMILIES["llama"]
    biases = {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in family.layers[0].items()
        if len(shape) == 2
    }
    layers = tuple({**layer, **biases} for layer in family.layers)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, "llama, biased", replace(family, layers=layers))
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a function from a family's name to its model in F32."""
    folder = tmp_path_factory.mktemp("originals")
    return functools.cache(lambda name: write_family(name, folder / f"{name}.gguf", weights=F32))


@pytest.fixture(scope="module")
def of_type(original, tmp_path_factory):
    """Return a function from a weight type to a qwen2 model, which has biases."""
    folder = tmp_path_factory.mktemp("types")
    return functools.cache(
        lambda weights: quantize(original("qwen2"), folder / f"{weights}.gguf", weights)
    )


@pytest.mark.parametrize("name", [*SERVED, "llama, biased"])
def test_any_order_leaves_what_a_model_says(original, tmp_path, name):
    source = original(name)
    blocks, path = blocks_of(source), tmp_path / "shuffled.gguf"
    expected = logits_of(source)
    for seed in range(2):
        order = order_by(blocks, scores_of(blocks, seed))
        backwards = np.tile(np.arange(blocks.n_groups, dtype=np.uint32)[::-1], (blocks.n_layers, 1))
        order = Order(backwards if seed else order.groups, order.neurons)
        shuffled(source, path, order=order)
        assert path.read_bytes()[-(1 << 16) :] != source.read_bytes()[-(1 << 16) :]
        np.testing.assert_allclose(logits_of(path), expected, rtol=0, atol=1e-3)
        write(restore(path, tmp_path / "restored.gguf"))
        assert (tmp_path / "restored.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("weights", QUANTIZED)
def test_other_types_are_restored_and_say_the_same_up_to_rounding(of_type, tmp_path, weights):
    source = of_type(weights)
    path = shuffled(source, tmp_path / "shuffled.gguf")
    found, expected = logits_of(path), logits_of(source)
    assert np.abs(found - expected).max() < 0.05 * expected.std()
    write(restore(path, tmp_path / "restored.gguf"))
    assert (tmp_path / "restored.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("weights", ["Q8_0", "Q4_K"])
def test_quantized_afterwards_any_order_is_as_good(original, of_type, tmp_path, weights):
    source = original("qwen2")
    blocks = blocks_of(source)
    write(write_reordered(source, tmp_path / "a.gguf", order_by(blocks, scores_of(blocks))))
    path = quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", weights)
    exact = logits_of(source)
    of_order, of_none = (np.abs(logits_of(p) - exact).mean() for p in (path, of_type(weights)))
    assert of_order < 1.5 * of_none


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(SERVED)))
def test_other_families_are_refused_by_name(tmp_path, name):
    path = write_family(name, tmp_path / "model.gguf")
    reason = "a mixture of experts" if FAMILIES[name].keys.get("expert_count") else "of the family"
    expected = (
        rf"it is {reason} .?{FAMILIES[name].arch}.*Supported are .* llama, qwen2, qwen3, gemma"
    )
    with pytest.raises(ConfigError, match=expected):
        blocks_of(path)
