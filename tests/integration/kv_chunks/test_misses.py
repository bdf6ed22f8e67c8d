"""Cells of another model, adapter or setting are a miss; those of the same model are found."""

from __future__ import annotations

import contextlib
import shutil

import gguf
import llama_cpp
import numpy as np
import pytest
from families import write_family
from llama_cpp import Llama
from rewritten_models import ORIGINAL_CONTEXT, write_longrope, write_split
from talks import CHAT, FOREIGN, ask, report

# -- misses -------------------------------------------------------------------------------------


def write_lora(path, seed):
    """Write an adapter that changes every K of the first layer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    rng = np.random.default_rng(seed)
    for name, shape in (("a", (4, 256)), ("b", (128, 4))):
        values = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_k.weight.lora_{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lora")
    return [write_lora(directory / f"{seed}.gguf", seed) for seed in range(2)]


OTHERS = {
    "LoRA": {"lora_path": "adapter"},
    "KV type": {"type_k": llama_cpp.GGML_TYPE_Q8_0},
    "flash attention": {"flash_attn": True},
    "RoPE base": {"rope_freq_base": 20000.0},
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_cells_of_other_settings_are_a_miss(make, suite, loras, settings):
    if "lora_path" in settings:
        settings = settings | {"lora_path": loras[0]}
    expected = ask(make(**settings), FOREIGN)
    active = suite()
    for changed in ({}, settings):  # the second must not find the first one's chunks
        llama = make(**changed)
        answer = ask(llama, FOREIGN)
        llama.close()
    assert answer == expected
    assert report(active)["restores"] == 0
    for changed in ({}, settings):  # each finds its own
        llama = make(**changed)
        ask(llama, FOREIGN)
        llama.close()
    assert report(active)["restored_tokens"] == 2 * len(FOREIGN)


@pytest.fixture
def answers(suite):
    """Return a function that asks a model in a new life and counts restored tokens."""

    def find(path, n_ctx=512, meanwhile=lambda: None):
        active = suite()
        llama = Llama(str(path), n_ctx=n_ctx, n_threads=1, verbose=False)
        meanwhile()
        ask(llama, FOREIGN, 1)
        llama.close()
        return report(active)["restored_tokens"]

    return find


def test_cells_of_other_rope_factors_are_a_miss(answers, tmp_path):
    path = write_longrope(write_family("phi3", tmp_path / "phi3.gguf"), tmp_path / "long.gguf")
    assert answers(path, ORIGINAL_CONTEXT) == 0
    assert answers(path, 2 * ORIGINAL_CONTEXT) == 0
    assert answers(path, ORIGINAL_CONTEXT) == len(FOREIGN)
    assert answers(path, 4 * ORIGINAL_CONTEXT) == len(FOREIGN)


def test_a_file_that_is_replaced_after_loading_is_never_taken_for_the_loaded_one(
    answers, tmp_path, caplog
):
    old, new = (write_family("llama", tmp_path / f"{i}.gguf", seed=i) for i in range(2))
    content = new.read_bytes()
    assert answers(old, meanwhile=lambda: new.replace(old)) == 0
    assert answers(old) == 0  # the new file
    assert answers(old) == len(FOREIGN)
    # the file is mapped, so write to it
    assert answers(old, meanwhile=lambda: old.write_bytes(content)) == 0
    assert "its model file was written to while in use" in caplog.text


@pytest.mark.slow
def test_splits_behind_the_first_count(answers, tmp_path):
    models = [write_family("llama", tmp_path / f"{i}.gguf", seed=i) for i in range(2)]
    (one, two), (_, other) = (write_split(model, 2) for model in models)
    assert answers(one) == 0
    assert answers(one) == len(FOREIGN)
    other.replace(two)
    assert answers(one) == 0


def test_adapters_are_told_apart(make, suite, loras):
    active = suite()
    for path, scale in ((loras[0], 1.0), (loras[0], 0.5), (loras[1], 1.0)):
        llama = make(lora_path=path, lora_scale=scale)
        ask(llama, FOREIGN)
        llama.close()
    assert report(active)["restores"] == 0


def test_changed_model_file_is_a_miss(packaged_model, suite, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(packaged_model, path)
    active = suite()

    def one():
        with contextlib.closing(
            Llama(str(path), n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1)
        ) as llama:
            ask(llama, FOREIGN)
        return report(active)["restores"]

    assert (one(), one()) == (0, 1)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b"llmaas-reference-7m", b"llmaas-reference-8m"))
    assert one() == 1
    path.unlink()
    path.write_bytes(content)
    assert one() == 2


def test_same_model_under_another_name_is_a_hit(make, reference_model, suite, tmp_path):
    active = suite()
    llama = make()
    ask(llama, CHAT)
    llama.close()
    shutil.copy(reference_model, tmp_path / "other-name.gguf")
    path = str(tmp_path / "other-name.gguf")
    with contextlib.closing(
        Llama(path, n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1)
    ) as llama:
        ask(llama, CHAT)
        assert report(active)["restored_tokens"] == len(CHAT)
