"""The list of parameters that decide the bytes of cells and states: complete, true, documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import llama_cpp
import pytest
from families import write_family
from llama_cpp import Llama
from llama_cpp import llama_cpp as bindings
from rewritten_models import ORIGINAL_CONTEXT, write_longrope

from llmaas_eval.families import write_lora
from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.build.encoder import _with_same_factors
from llmaas_plugins.model import identity as model_identity
from llmaas_plugins.model.identity import (
    COUNTED,
    LEFT_OUT,
    cell_identity,
    load_of,
    may_have_long_factors,
    rope_switch,
    state_identity,
)

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "internals.md"


def parameters():
    """Return the names of all parameters of llama.cpp and ``Llama``, as installed here."""
    return {
        *(f"model.{name}" for name, *_ in bindings.llama_model_params._fields_),
        *(f"context.{name}" for name, *_ in bindings.llama_context_params._fields_),
        *(f"Llama.{name}" for name in inspect.signature(Llama.__init__).parameters),
    } - {"Llama.self"}


def test_every_parameter_is_counted_or_left_out_for_a_reason():
    assert COUNTED.keys() & LEFT_OUT.keys() == set()
    assert all({**COUNTED, **LEFT_OUT}.values())
    assert parameters() - COUNTED.keys() - LEFT_OUT.keys() == set(), (
        "llama-cpp-python has new parameters: count them in model_identity, or say there why not"
    )


def test_every_parameter_is_documented():
    section = PAGE.read_text().partition("## Identity")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([\w.]+)`", section))
    names = {name.partition(".")[2] for name in (*COUNTED, *LEFT_OUT)}
    assert names - documented == set()


# -- that what is counted matters, and what is left out does not ---------------------------------

COUNTS = {
    "model_path": "another model",
    "lora_path": "an adapter",
    "kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3},
    "rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "rope_freq_base": 20000.0,
    "rope_freq_scale": 0.5,
    "yarn_ext_factor": 0.5,
    "yarn_attn_factor": 0.5,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 128,
    "attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_CAUSAL,
    "type_k": llama_cpp.GGML_TYPE_Q8_0,
    "type_v": llama_cpp.GGML_TYPE_F32,
    "flash_attn": True,
    "swa_full": False,
}
ELSEWHERE = {"lora_scale", "n_ctx"}
"""Parameters that are tested below: they matter with an adapter or with two sets of factors."""
ONLY_CELLS = {"type_k", "type_v", "flash_attn", "swa_full"}
LEAVES_ALONE = {
    "n_ctx": 512, "n_batch": 8, "n_ubatch": 8, "n_threads": 2, "n_threads_batch": 2,
    "logits_all": True, "use_mmap": False, "seed": 5, "last_n_tokens_size": 3, "no_perf": True,
    "chat_format": "chatml", "offload_kqv": False, "op_offload": False, "spm_infill": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_family("llama", tmp_path_factory.mktemp("identity") / "model.gguf")


@pytest.fixture
def identities(model, tmp_path):
    """Return both identities of a ``Llama`` with these settings."""

    def find(**settings):
        if "model_path" in settings:
            settings["model_path"] = str(write_family("llama", tmp_path / "b.gguf", seed=1))
        if "lora_path" in settings:
            settings["lora_path"] = str(write_lora("llama", tmp_path / "lora.gguf"))
        base = {"model_path": str(model), "n_ctx": 256, "n_threads": 1, "verbose": False}
        llama = Llama(**(base | settings))
        load = load_of(llama)
        found = state_identity(llama, load), cell_identity(llama, load, rotation_off=False)
        llama.close()
        return found

    return find


def test_each_counted_argument_has_an_example():
    arguments = {name.partition(".")[2] for name in COUNTED if name.startswith("Llama.")}
    assert arguments == COUNTS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_counted_makes_another_identity(identities, name):
    states, cells = identities()
    other_states, other_cells = identities(**{name: COUNTS[name]})
    assert cells != other_cells
    assert (states == other_states) == (name in ONLY_CELLS)


def test_what_is_left_out_makes_none(identities):
    assert identities() == identities(**LEAVES_ALONE)


def test_the_scale_of_an_adapter_counts_with_one(identities):
    assert identities(lora_scale=0.5) == identities()
    assert identities(lora_path="one", lora_scale=0.5) != identities(lora_path="one")


def test_rotation_counts_as_llama_cpp_reads_it(model, monkeypatch):
    for value, is_off in ((None, False), ("", False), ("0", False), (" 1x", True), ("-2", True)):
        if value is None:
            monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE", raising=False)
        else:
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
        assert model_identity.is_rotation_off() == is_off
    llama = Llama(str(model), n_ctx=256, verbose=False)
    found = [cell_identity(llama, load_of(llama), rotation_off=off) for off in (True, False)]
    llama.close()
    assert found[0] != found[1]


def test_a_release_whose_cells_are_the_same_makes_no_other_identity(identities, monkeypatch):
    found = []
    for version in (2, 3, 4):
        monkeypatch.setattr(model_identity.package, "LLAMA_STATE_SEQ_VERSION", version)
        monkeypatch.setattr(model_identity.package, "__version__", f"0.3.{version}")
        found.append(identities()[1])
    assert found[0] == found[1] != found[2]


def test_an_adapter_that_nobody_saw_is_loaded_has_no_identity(model, tmp_path):
    lora = write_lora("llama", tmp_path / "lora.gguf")
    llama = Llama(str(model), n_ctx=256, verbose=False, lora_path=str(lora))
    load = load_of(llama)
    load.adapters.clear()
    with pytest.raises(StoreError, match="cannot tell which adapter"):
        state_identity(llama, load)
    llama.close()


# -- two sets of RoPE factors ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longrope")
    return write_longrope(write_family("phi3", folder / "phi3.gguf"), folder / "long.gguf")


def opened(path, n_ctx, **settings):
    return Llama(str(path), n_ctx=n_ctx, n_batch=64, n_threads=1, verbose=False, **settings)


def test_the_length_counts_where_it_chooses_the_factors(longrope, model):
    def identity(path, n_ctx, **settings):
        llama = opened(path, n_ctx, **settings)
        found = state_identity(llama, load_of(llama))
        llama.close()
        return found

    short = identity(longrope, ORIGINAL_CONTEXT)
    assert short == identity(longrope, 100)  # of as many cells
    assert short != identity(longrope, ORIGINAL_CONTEXT + 1)
    assert identity(longrope, ORIGINAL_CONTEXT + 1) == identity(longrope, 1024)
    key = "phi3.rope.scaling.original_context_length"
    overridden = {"kv_overrides": {key: 4 * ORIGINAL_CONTEXT}}
    assert identity(longrope, 4 * ORIGINAL_CONTEXT, **overridden) == identity(
        longrope, ORIGINAL_CONTEXT, **overridden
    )
    llama = opened(model, 256)  # with one set, no length matters
    n_train = rope_switch(int(llama.model), None)
    llama.close()
    assert identity(model, 256) == identity(model, n_train + 1)


def test_whether_a_model_has_two_sets_is_known_or_taken_for_granted(longrope, model, tmp_path):
    def may_have(path):
        files = model_identity.files_now(path)
        return may_have_long_factors(model_identity.ModelLoad(str(path), None, files))

    assert may_have(longrope)
    assert not may_have(model)
    assert may_have(tmp_path / "none")
    (tmp_path / "odd").write_bytes(b"GGUF?")
    assert may_have(tmp_path / "odd")
    assert may_have_long_factors(None)


@pytest.mark.parametrize("n_ctx", [256, 512, 8192])
def test_pairs_are_encoded_with_the_factors_of_the_app(longrope, model, n_ctx):
    for path in (longrope, model):
        llama = opened(path, n_ctx)
        switch = rope_switch(int(llama.model), None)
        for wanted in (100, 256, 257, 512, 4096):
            found = _with_same_factors(llama, wanted)
            if path == model:
                assert found == wanted
            else:
                padded = -(-found // 256) * 256
                assert (padded > switch) == (n_ctx > switch)
        llama.close()
