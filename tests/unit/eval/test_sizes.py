"""Models of the sizes that people run: types, statistics, files that llama.cpp loads, memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from llama_cpp import Llama

from llmaas_eval.models import Shape, write_random_model
from llmaas_eval.sizes.activity import ACTIVITIES
from llmaas_eval.sizes.blocks import Stock
from llmaas_eval.sizes.cli import main
from llmaas_eval.sizes.mixture import FILE_TYPES, tensor_types
from llmaas_eval.sizes.shapes import SHAPES, RopeFactors, SizedShape
from llmaas_eval.sizes.writing import plan_model, write_sized
from llmaas_hooks import ConfigError
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.model.quantize import run_quantizer
from llmaas_plugins.reference_model import reference_model_path

N_VOCAB = 4096
SMALL = SizedShape("llama", "", 8, 256, 4, 2, 64, 512, 512)
REFERENCE = ACTIVITIES["reference"]


def written(path, shape, file_type="Q4_0", activity=REFERENCE):
    model = plan_model("small", shape, file_type, reference_model_path())
    assert sum(write_sized(path, model, activity)) == model.n_bytes == path.stat().st_size
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a model of the small shape that is not quantized."""
    shape = Shape(n_layer=8, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_ctx=512)
    path = tmp_path_factory.mktemp("whole") / "f16.gguf"
    return write_random_model(path, shape, GGMLQuantizationType.F16)


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_types_are_those_that_the_quantizer_chooses_for_a_whole_model(tmp_path, whole, file_type):
    path = tmp_path / "quantized.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    run_quantizer(whole, path, params)
    expected = {name: tensor.type for name, tensor in read_header(path).tensors.items()}
    assert tensor_types(SMALL, N_VOCAB, file_type) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("file_type", "activity"), [("Q4_0", "reference"), ("Q4_K_M", "published")]
)
def test_llama_cpp_loads_models_whose_logits_are_neither_flat_nor_certain(
    tmp_path, name, file_type, activity
):
    shape = replace(SHAPES[name].shrunk(4), n_layer=2)
    path = written(tmp_path / "model.gguf", shape, file_type, ACTIVITIES[activity])
    llama = Llama(str(path), n_ctx=64, n_threads=2, logits_all=True, verbose=False)
    tokens = np.random.default_rng(0).integers(300, N_VOCAB, 32)
    llama.eval(tokens.tolist())
    logits = llama.scores[:32]
    assert np.isfinite(logits).all()
    assert 3 < logits.std(axis=1).min() <= logits.std(axis=1).max() < 5
    predicted = logits.argmax(axis=1)
    assert (predicted == tokens).mean() < 0.2, "a tied matrix makes tokens predict themselves"
    assert len(set(predicted)) > 16


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for n_layer in (4, 16):
        model = plan_model("", replace(SMALL, n_layer=n_layer, n_ff=4096), "Q8_0",
                           reference_model_path())  # fmt: skip
        tracemalloc.start()
        for _ in write_sized(tmp_path / "model.gguf", model, REFERENCE):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert model.n_bytes > peaks[1]
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_rows_have_their_standard_deviations_and_differ(name):
    type_, scales = GGMLQuantizationType[name], np.float32([0.01, 0.02, 0.02, 0.3])
    stock = Stock(type_, np.random.default_rng(0))
    rows = quants.dequantize(stock.rows(scales, 1 << 14), type_)
    assert rows.std(axis=1) == pytest.approx(scales, rel=0.05)
    assert abs(rows.mean(axis=1) / scales).max() < 0.05
    assert abs(np.corrcoef(rows) - np.eye(4)).max() < 0.05


def test_the_seed_decides(tmp_path):
    model = plan_model("", replace(SMALL, n_layer=1), "Q4_0", reference_model_path())
    contents = set()
    for seed in (1, 1, 2):
        assert sum(write_sized(tmp_path / "model.gguf", model, REFERENCE, seed)) == model.n_bytes
        contents.add((tmp_path / "model.gguf").read_bytes())
    assert len(contents) == 2


@pytest.mark.parametrize(("name", "n_large"), [("reference", 0), ("published", 6)])
def test_outliers_are_the_same_channels_in_every_layer(tmp_path, name, n_large):
    path = written(tmp_path / "model.gguf", SMALL, activity=ACTIVITIES[name])
    norms = np.array([t.data for t in GGUFReader(path).tensors if t.name.endswith("_norm.weight")])
    blocks = norms[norms.std(axis=1) > 0]
    assert len(blocks) == 16
    assert (blocks == 20).all(axis=0).sum() == (blocks > 10).any(axis=0).sum() == n_large


def test_heads_and_neurons_differ(tmp_path):
    path = written(tmp_path / "model.gguf", replace(SMALL, n_head=32, n_head_kv=32, n_ff=4096))
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def row_norms(name):
        tensor = tensors[f"blk.0.{name}.weight"]
        return np.log(np.linalg.norm(quants.dequantize(tensor.data, tensor.tensor_type), axis=1))

    assert row_norms("ffn_up").std() == pytest.approx(REFERENCE.neurons, rel=0.1)
    assert row_norms("ffn_gate").std() < 0.1
    values = row_norms("attn_v").reshape(32, 64)
    assert values.std(axis=1).mean() == pytest.approx(REFERENCE.values, rel=0.1)
    assert values.mean(axis=1).std() == pytest.approx(REFERENCE.value_heads, rel=0.3)


def test_rope_factors_divide_slow_frequencies_only():
    divisors = RopeFactors(8.0, 1.0, 4.0, 8192).divisors(128, 500000.0)
    waves = 2 * np.pi * 500000 ** (np.arange(0, 128, 2) / 128)
    assert divisors.shape == (64,)
    assert (divisors[waves < 2048] == 1).all()
    assert divisors[waves > 8192] == pytest.approx(8)
    between = divisors[(waves > 2048) & (waves < 8192)]
    assert (np.diff(between) > 0).all()
    assert 1 < between[0] < between[-1] < 8


@pytest.mark.parametrize("name", SHAPES)
def test_shrunk_shapes_keep_groups_and_heads(name):
    whole, small = SHAPES[name], SHAPES[name].shrunk(4)
    assert SHAPES[name].shrunk(4, 3) == replace(small, n_layer=3)
    assert small.n_head * whole.n_head_kv == whole.n_head * small.n_head_kv
    assert (small.head_dim, small.n_layer) == (whole.head_dim, whole.n_layer)
    assert not small.n_ff % 256


def test_a_vocabulary_without_tokens_is_refused(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"other\.gguf is no vocabulary"):
        plan_model("", SMALL, "Q4_0", other)


def test_the_command_says_which_sdist_it_cannot_use(tmp_path, capsys):
    none = str(tmp_path / "none.tar.gz")
    args = ["make", "llama-2-7b", "--sdist", none, "-o", str(tmp_path / "model.gguf")]
    assert main(args) == 2
    assert "none.tar.gz is not a readable sdist" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_writes_with_a_vocabulary_that_is_there(tmp_path, capsys):
    vocabulary = tmp_path / "ggml-vocab-llama-spm.gguf"
    vocabulary.symlink_to(reference_model_path())
    path = tmp_path / "model.gguf"
    args = ["make", "mixtral-8-layers", "--shrink", "4", "--layers", "2", "--type", "Q4_0"]
    assert main([*args, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert read_header(path).fields["llama.block_count"] == 2
    assert "A quarter of Mixtral" in said
    assert "measured by" in said
    assert read_header(path).fields["llama.expert_count"] == 8
