"""A datastore's fingerprint: it tells models and modified models apart, but ignores rounding."""

from __future__ import annotations

import shutil

import pytest
from llama_cpp import llama_cpp

from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint


@pytest.fixture
def named(make_llama):
    def name(**kwargs):
        return fingerprint(make_llama(**({"n_ctx": 64} | kwargs)))

    return name


def test_same_model_has_one_fingerprint(named, make_llama, reference_model, tmp_path):
    first = named()
    assert len(first) == 32
    for settings in (
        {"n_ctx": 128},
        {"flash_attn": True},
        {
            "flash_attn": True,
            "type_k": llama_cpp.GGML_TYPE_Q8_0,
            "type_v": llama_cpp.GGML_TYPE_Q8_0,
        },
        {"n_batch": 32, "n_threads": 2},
    ):
        assert named(**settings) == first
    copy = shutil.copy(reference_model, tmp_path / "copy.gguf")
    llama = make_llama(n_ctx=64)
    llama.model_path = str(copy)  # the file's bytes count, not its place
    assert fingerprint(llama) == first


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_freq_base": 20_000.0},
        {"rope_freq_scale": 0.5},
        {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
    ],
    ids=str,
)
def test_model_used_otherwise_has_another(named, settings):
    assert named(**settings) != named()


def test_model_file_with_other_bytes_has_another(named, make_llama, reference_model, tmp_path):
    changed = bytearray(reference_model.read_bytes())
    changed[-100] ^= 1  # a weight
    (tmp_path / "other.gguf").write_bytes(changed)
    llama = make_llama(n_ctx=64)
    llama.model_path = str(tmp_path / "other.gguf")
    assert fingerprint(llama) != named()


def test_adapter_and_its_scale_count(named, make_llama, tmp_path):
    llama, found = make_llama(n_ctx=64), {named()}
    (tmp_path / "adapter.gguf").write_bytes(b"any")
    llama.lora_path = str(tmp_path / "adapter.gguf")
    for llama.lora_scale in (1.0, 0.5):
        found.add(fingerprint(llama))
    assert len(found) == 3
