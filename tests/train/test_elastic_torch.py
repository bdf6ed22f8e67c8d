"""The decoder in torch, against llama.cpp, with all units and with some of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from elastic_models import TOKENS, logits_of
from gguf import GGMLQuantizationType

from llmaas_eval.families import FAMILIES, Family, write_family
from llmaas_eval.weights import f16_copy
from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.units import FAMILIES as SERVED
from llmaas_plugins.elastic.units import Widths
from llmaas_plugins.model.gguf_header import read_header

torch = pytest.importorskip("torch", reason="make test-train installs it")
torch_model = pytest.importorskip("llmaas_plugins.elastic.torch_model")

F32 = GGMLQuantizationType.F32
GELU_STEP = 5e-3
"""llama.cpp computes GELU from a table indexed by 16-bit floats."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function from a family's name to its model in F32."""
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: write_family(name, folder / f"{name}.gguf", weights=F32))


@pytest.fixture
def special(tmp_path, monkeypatch):
    """Return a function that writes a family's model with other metadata or extra tensors."""

    def write(name, keys=(), ends=()):
        base = FAMILIES[name]
        family = Family(base.arch, base.layers, base.keys | dict(keys), base.ends | dict(ends))
        monkeypatch.setitem(FAMILIES, "special", family)
        return write_family("special", tmp_path / "special.gguf", weights=F32)

    return write


def said(path, gates=None):
    decoder = torch_model.Decoder(path)
    with torch.no_grad():
        return decoder.logits(decoder.run(np.array([TOKENS], np.int32), gates)[0]).numpy()


def check_same(path, atol):
    np.testing.assert_allclose(said(path), logits_of(path), rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # with a softly limited score, too
def test_windows_of_a_batch_are_computed_apart(written, name):
    decoder = torch_model.Decoder(written(name))
    x = decoder.embed(np.array([TOKENS, TOKENS[::-1]], np.int32))
    weights = decoder.weights(0)
    one_by_one = torch.stack([decoder.block(0, weights, window) for window in x])
    torch.testing.assert_close(decoder.block(0, weights, x), one_by_one)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_it_says_what_the_engine_says(written, name):
    check_same(written(name), GELU_STEP if "gemma" in name else 1e-3)


def test_a_trained_model_too(reference_model, tmp_path):
    # the engine rounds activations to 16 bits
    check_same(f16_copy(reference_model, tmp_path), 2e-2)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"rope.scaling.factor": 4.0, "rope.freq_base": 5e5}),
        ("qwen3", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ("gemma2", {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}),
        (
            "gemma3",
            {"attention.sliding_window": 8, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e5},
        ),
        ("gemma3", {"attention.sliding_window": 8, "rope.scaling.factor": 8.0}),
        ("gemma3", {"final_logit_softcapping": 3.0}),
    ],
)
def test_with_other_settings_too(special, name, keys):
    check_same(special(name, keys), GELU_STEP)


def test_with_rope_factors_and_an_output_matrix_too(special):
    ends = {"rope_freqs.weight": (32,), "output.weight": (4096, 256)}
    path = special("llama", ends=ends)
    before = said(path)
    factors = np.linspace(1, 8, 32, dtype=np.float32).tobytes()
    place = read_header(path).tensors["rope_freqs.weight"]
    with path.open("r+b") as file:
        file.seek(place.at)
        file.write(factors)
    check_same(path, 1e-3)
    assert np.abs(said(path) - before).max() > 0.1


@pytest.mark.parametrize(
    ("keys", "ends", "message"),
    [
        ({"rope.scaling.type": "yarn"}, {}, "'yarn'"),
        ({"rope.scaling.attn_factor": 2.0}, {}, r"rope\.scaling\.attn_factor"),
        ({}, {"blk.0.attn_q.scale": (1,)}, r"blk\.0\.attn_q\.scale"),
        ({}, {"cls.output.weight": (2, 256)}, r"cls\.output"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(special, keys, ends, message):
    with pytest.raises(ConfigError, match=message):
        torch_model.Decoder(special("llama", keys, ends))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_removed_units_are_as_if_their_weights_were_zero(written, monkeypatch, name):
    decoder = torch_model.Decoder(written(name))
    widths = Widths(np.array([1, 2], np.int32), np.array([512, 96], np.int32))
    found = said(written(name), torch_model.gates_of(widths, decoder))
    read = torch_model.Decoder.weights

    def cut(self, layer):
        weights = read(self, layer)
        weights["attn_output.weight"][:, 128 * int(widths.groups[layer]) :] = 0
        weights["ffn_down.weight"][:, int(widths.neurons[layer]) :] = 0
        return weights

    full = said(written(name))
    monkeypatch.setattr(torch_model.Decoder, "weights", cut)
    np.testing.assert_allclose(found, said(written(name)), rtol=0, atol=1e-4)
    assert np.abs(found - full).max() > 0.1


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_loss_and_its_gradient_are_torchs_own(written, monkeypatch, name):
    decoder = torch_model.Decoder(written(name))
    monkeypatch.setattr(torch_model, "_CHUNK", 256 * 1000)
    x = decoder.run(np.array([TOKENS], np.int32))[0].requires_grad_()
    targets = torch.tensor(TOKENS[::-1])
    expected = torch.nn.functional.cross_entropy(decoder.logits(x), targets, reduction="none")
    torch.testing.assert_close(decoder.losses(x, targets), expected)
    expected.sum().backward()
    torch.testing.assert_close(decoder.loss_gradient(x, targets), x.grad)
