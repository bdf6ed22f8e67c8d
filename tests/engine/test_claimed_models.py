"""Claims hold for their model: beside others, in several files, with adapters, with overrides."""

from __future__ import annotations

import ctypes
import itertools
import shutil

import llama_cpp
import numpy as np
import pytest
from claiming import (
    Claimer,
    add_adapter,
    claimed,
    created,
    evaluate,
    loaded,
    model_params,
    native,
    opened,
    vanilla,
)
from families import write_family
from matrices import DOWN, UP, zeroed
from rewritten_models import write_split

from llmaas_hooks import WeightClaim, hookimpl

# -- several models and contexts --------------------------------------------------------------


class OneModel(Claimer):
    """Plugin that claims the weights of one model file."""

    def __init__(self, path, *claims):
        super().__init__(*claims)
        self.path = str(path)

    @hookimpl
    def llmaas_weights(self, load):
        return list(self.claims) if load.path == self.path else []


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_a_model_whose_weights_have_the_same_names_keeps_its_own(family, tmp_path, source):
    path, other = family("llama", "Q8_0"), write_family("llama", tmp_path / "other.gguf", seed=1)
    claim = WeightClaim(UP, source=source, rows=(64,))
    narrow, left_alone = claimed(path, claim), vanilla(other)
    plugin = OneModel(path, claim)
    with native(plugin=plugin), opened(path) as one, opened(other) as two:
        for _ in range(2):
            assert np.array_equal(evaluate(one), narrow)
            assert np.array_equal(evaluate(two), left_alone)


def test_contexts_of_a_model_have_levels_of_their_own(family, tmp_path):
    path, plugin = family("llama", "Q4_0"), Claimer(WeightClaim(UP, rows=(None, 64)))
    all_rows = vanilla(path)
    few_rows = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=64))
    with (
        native(plugin=plugin),
        loaded(path) as llama,
        created(llama) as wide,
        created(llama) as narrow,
    ):
        plugin.contexts[1].level = 1
        for _ in range(2):
            assert np.array_equal(evaluate(wide), all_rows)
            assert np.array_equal(evaluate(narrow), few_rows)


# -- several files ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["tiles", "file"])
def test_a_model_in_several_files(family, tmp_path, source):
    path = shutil.copyfile(family("llama", "Q4_0"), tmp_path / "model.gguf")
    settings = {"use_extra_bufts": source == "tiles"}
    expected = vanilla(path, **settings)
    claim = WeightClaim(f"{UP}|{DOWN}", source=source)
    paths = write_split(path, 3)
    assert np.array_equal(claimed(paths[0], claim, **settings), expected)  # found by their names
    paths = [part.rename(tmp_path / f"{part.stem[-14]}-{i}.bin") for i, part in enumerate(paths)]
    names = (ctypes.c_char_p * 3)(*(str(part).encode() for part in paths))
    with native(plugin=Claimer(claim)):
        params = model_params(**settings)
        llama = llama_cpp.llama_model_load_from_splits(names, 3, params)
        assert llama is not None
        with created(llama) as ctx:
            assert np.array_equal(evaluate(ctx), expected)
        llama_cpp.llama_model_free(llama)


# -- adapters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_an_adapter_of_claimed_weights(family, lora, source):
    """Unclaimed adapter matrices take the place of the claimed weight's bytes."""
    path = family("llama", "Q4_0")
    queries = r"blk\.\d+\.attn_(q|v)\.weight"
    claim = WeightClaim(queries, source=source, rows=() if source else (256, 128))
    settings = {"use_extra_bufts": source != "file"}

    def with_adapter():
        with loaded(path, **settings) as llama, created(llama) as ctx:
            before = evaluate(ctx)
            add_adapter(llama, ctx, lora)
            return before, evaluate(ctx)

    before, expected = with_adapter()
    with native(plugin=Claimer(claim)):
        found_before, found = with_adapter()
    assert np.array_equal(found_before, before)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, before)


# -- the app's parameters ---------------------------------------------------------------------


class Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


@pytest.fixture
def repacked_type():
    """Return ggml-cpu's buffer type for repacked weights."""
    ggml = ctypes.CDLL("libggml.so.0")
    for name in ("reg_by_name", "reg_get_proc_address", "reg_dev_get"):
        getattr(ggml, f"ggml_backend_{name}").restype = ctypes.c_void_p
    ggml.ggml_backend_buft_name.restype = ctypes.c_char_p
    cpu = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(b"CPU"))
    asked = b"ggml_backend_dev_get_extra_bufts"
    found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(
        ggml.ggml_backend_reg_get_proc_address(cpu, asked)
    )(ggml.ggml_backend_reg_dev_get(cpu, ctypes.c_size_t(0)))
    for each in itertools.takewhile(bool, found):
        if ggml.ggml_backend_buft_name(ctypes.c_void_p(each)) == b"CPU_REPACK":
            return each
    return pytest.skip("ggml-cpu repacks nothing on this processor")


def test_the_apps_own_overrides_stay_in_force(family, repacked_type):
    path = family("llama", "Q4_K")
    overrides = (Override * 2)(Override(b"ffn_(up|gate)", repacked_type))
    address = ctypes.cast(overrides, ctypes.c_void_p).value
    settings = {"tensor_buft_overrides": address, "use_extra_bufts": False}
    expected = vanilla(path, **settings)
    assert not np.array_equal(expected, vanilla(path, use_extra_bufts=False))
    claim = WeightClaim(DOWN, source="file")
    assert np.array_equal(claimed(path, claim, **settings), expected)


def test_the_apps_parameters_are_as_they_were(family):
    params = model_params()
    before = bytes(params)
    with native(plugin=Claimer(WeightClaim(DOWN, source="tiles"))):
        llama = llama_cpp.llama_model_load_from_file(str(family("llama", "Q4_0")).encode(), params)
        assert bytes(params) == before
        llama_cpp.llama_model_free(llama)
