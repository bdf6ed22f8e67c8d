"""Claimed weights compute what llama.cpp computes, and parts of them what it computes with zeros.

The other side is stock llama.cpp throughout: a model file whose unused rows or columns are zero
gives what the narrowed original gives. Sums are the same bits wherever the same kernels run.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from claiming import (
    Claimer,
    add_adapter,
    claimed,
    created,
    decode,
    evaluate,
    loaded,
    model_params,
    native,
    opened,
    vanilla,
    zeroed,
)
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from llmaas_eval.families import write_family, write_lora
from llmaas_eval.models import Shape, copy_field, write_random_model
from llmaas_eval.quantise import WEIGHTS, quantise
from llmaas_hooks import WeightClaim, hookimpl

UP = r"blk\.\d+\.ffn_up\.weight"
DOWN = r"blk\.\d+\.ffn_down\.weight"
ROWS = {
    "llama": (r"blk\.\d+\.(ffn_up|ffn_gate|attn_q)\.weight", 100),
    "llama-moe": (r"blk\.\d+\.ffn_(up|gate)_exps\.weight", 100),
    "phi3": (r"blk\.\d+\.(ffn_up|attn_qkv)\.weight", 300),
}
COLUMNS = {
    "llama": (DOWN, 250),
    "llama-moe": (r"blk\.\d+\.ffn_down_exps\.weight", 128),
    "phi3": (DOWN, 250),
}
SHAPE = Shape(n_layer=2, n_embd=1024, n_head=8, n_head_kv=4, n_ff=5120, n_ctx=512)
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K")
LOAD_MODES = ("NONE", "MMAP", "DIRECT_IO")
CUT = [
    (family, weights)
    for family in COLUMNS
    for weights in TYPES
    if (family, weights) != ("llama-moe", "Q4_K")  # its experts' rows are a single block
]
PLAIN, REPACKED = False, True  # what use_extra_bufts is


def rounded(n, step):
    return -(-n // step) * step


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Path of a family's model with weights of a type; written once."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(family, weights="Q4_0"):
        path = folder / f"{family}-{weights}.gguf"
        if weights in WEIGHTS and weights != "F16":
            return quantise(make(family, "F16"), path, weights)
        return write_family(family, path, weights=GGMLQuantizationType[weights])

    return make


# -- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [PLAIN, REPACKED], ids=["plain", "repacked"])
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("family", ROWS)
def test_rows_left_out_are_rows_of_zeros(model, tmp_path, family, weights, extra):
    path = model(family, weights)
    pattern, n = ROWS[family]
    # Repacked rows are cut at groups of 8, so both read the same.
    expected = zeroed(path, tmp_path / "zeroed.gguf", pattern, rows=rounded(n, 8))
    found = claimed(path, WeightClaim(pattern, rows=(rounded(n, 8),)), use_extra_bufts=extra)
    assert np.array_equal(found, vanilla(expected, use_extra_bufts=extra))
    assert not np.array_equal(found, vanilla(path, use_extra_bufts=extra))


@pytest.mark.parametrize("weights", ["F16", "Q8_0"])
def test_plain_rows_are_cut_anywhere(model, tmp_path, weights):
    path = model("llama", weights)
    settings = {"use_extra_bufts": False}
    found = claimed(path, WeightClaim(UP, rows=(101,)), **settings)
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=101), **settings)
    if weights == "F16":  # 101 rows go through another of ggml-cpu's kernels than 512
        np.testing.assert_allclose(found, expected, atol=2e-3)
    else:
        assert np.array_equal(found, expected)
    fewer = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=100), **settings)
    assert np.abs(found - fewer).max() > 0.01


def test_repacked_rows_are_cut_at_eight(model, tmp_path):
    path = model("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=104), use_extra_bufts=True)
    found = claimed(path, WeightClaim(UP, rows=(97,)), use_extra_bufts=True)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("extra", [PLAIN, REPACKED], ids=["plain", "repacked"])
@pytest.mark.parametrize(("family", "weights"), CUT)
def test_columns_left_out_are_columns_of_zeros(model, tmp_path, family, weights, extra):
    path = model(family, weights)
    pattern, n = COLUMNS[family]
    n = rounded(n, 256 if weights == "Q4_K" else 32)
    copy = zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=n)
    found = claimed(path, WeightClaim(pattern, columns=(n,)), use_extra_bufts=extra)
    expected = vanilla(copy, use_extra_bufts=extra)
    if (family, weights) in {("llama", "F32"), ("phi3", "F32")}:
        # F32 activations with gaps between their rows go through another of ggml-cpu's kernels.
        np.testing.assert_allclose(found, expected, atol=2e-3)
    else:
        assert np.array_equal(found, expected)
    assert np.abs(found - vanilla(path, use_extra_bufts=extra)).max() > 0.1


@pytest.mark.parametrize(("weights", "n", "block"), [("Q8_0", 250, 32), ("Q4_K", 100, 256)])
def test_columns_are_rounded_up_to_whole_blocks(model, tmp_path, weights, n, block):
    path = model("llama", weights)
    copy = zeroed(path, tmp_path / "zeroed.gguf", DOWN, columns=rounded(n, block))
    assert np.array_equal(claimed(path, WeightClaim(DOWN, columns=(n,))), vanilla(copy))


@pytest.mark.parametrize("weights", ["F16", "Q4_0"])
def test_columns_of_the_attention_output(model, tmp_path, weights):
    path, pattern = model("llama", weights), r"blk\.1\.attn_output\.weight"
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=96))
    assert np.array_equal(claimed(path, WeightClaim(pattern, columns=(96,))), expected)


def test_rows_of_one_weight_and_the_columns_of_the_next_belong_together(model):
    path = model("llama", "Q4_0")
    gates = WeightClaim(r"blk\.\d+\.ffn_(up|gate)\.weight", rows=(256,))
    down = WeightClaim(DOWN, columns=(256,))
    assert np.array_equal(claimed(path, gates, down), claimed(path, gates))


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_a_part_is_one_on_several_threads_too(model, source):
    path, claim = model("llama", "Q4_0"), WeightClaim(DOWN, source=source, columns=(0, 256))
    found = []
    for n_threads in (1, 3):
        plugin = Claimer(claim)
        with native(plugin=plugin), loaded(path) as llama:
            settings = {"n_threads": n_threads, "n_threads_batch": n_threads}
            with created(llama, **settings) as ctx:
                plugin.contexts[0].level = 1
                found.append(evaluate(ctx))
    assert np.array_equal(*found)


# -- sources ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("family", COLUMNS)
def test_a_tile_of_all_columns_is_the_weight_as_ggml_would_keep_it(model, family, weights):
    path = model(family, weights)
    found = claimed(path, WeightClaim(COLUMNS[family][0], source="tiles"), use_extra_bufts=True)
    assert np.array_equal(found, vanilla(path, use_extra_bufts=True))


@pytest.mark.parametrize(("family", "weights"), CUT)
def test_columns_up_to_a_cut_are_one_tile(model, tmp_path, family, weights):
    path = model(family, weights)
    pattern, n = COLUMNS[family]
    n = rounded(n, 256 if weights == "Q4_K" else 32)
    copy = zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=n)
    claim = WeightClaim(pattern, source="tiles", columns=(0, n))
    found = claimed(path, claim, level=1, use_extra_bufts=True)
    assert np.array_equal(found, vanilla(copy, use_extra_bufts=True))


def test_sums_of_tiles_are_the_product_but_for_rounding(model, tmp_path):
    path, cuts = model("llama", "Q4_0"), tuple(range(32, 512, 32))  # 16 tiles, the most there are
    claim = WeightClaim(DOWN, source="tiles", columns=cuts)
    for level in (-1, 4, 14):
        copy = tmp_path / "zeroed.gguf"
        expected = path if level < 0 else zeroed(path, copy, DOWN, columns=cuts[level])
        found = claimed(path, claim, level=level)
        np.testing.assert_allclose(found, vanilla(expected), atol=0.1)


@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("family", ROWS)
def test_what_is_read_from_the_file_is_what_was_in_memory(model, family, weights):
    path = model(family, weights)
    pattern = f"{ROWS[family][0]}|{COLUMNS[family][0]}"
    found = claimed(path, WeightClaim(pattern, source="file"), use_extra_bufts=False)
    assert np.array_equal(found, vanilla(path, use_extra_bufts=False))


@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("family", ROWS)
def test_parts_of_what_is_read_from_the_file(model, tmp_path, family, weights):
    path, copy = model(family, weights), tmp_path / "zeroed.gguf"
    pattern, n = ROWS[family]
    found = claimed(path, WeightClaim(pattern, source="file", rows=(n,)), use_extra_bufts=False)
    expected = vanilla(zeroed(path, copy, pattern, rows=n), use_extra_bufts=False)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("source", ["tiles", "file"])
def test_one_plugin_claims_the_source_and_another_the_part(model, source):
    path = model("llama", "Q8_0")
    alone = claimed(path, WeightClaim(DOWN, source=source, columns=(64,)))
    there, which = (
        Claimer(WeightClaim(DOWN, source=source)),
        Claimer(WeightClaim(DOWN, columns=(64,))),
    )
    with native(there=there, which=which), opened(path) as ctx:
        assert np.array_equal(evaluate(ctx), alone)
        assert there.contexts == which.contexts


@pytest.mark.parametrize("source", ["tiles", "file"])
@pytest.mark.parametrize("load_mode", LOAD_MODES)
def test_sources_work_however_the_file_is_loaded(model, source, load_mode):
    path = model("llama", "Q4_0")
    mode = getattr(llama_cpp, f"LLAMA_LOAD_MODE_{load_mode}")
    settings = {"load_mode": mode, "use_extra_bufts": source == "tiles"}
    found = claimed(path, WeightClaim(DOWN, source=source), **settings)
    assert np.array_equal(found, vanilla(path, **settings))


# -- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_levels_change_between_batches_and_back(model, source):
    path, plugin = (
        model("llama", "Q4_0"),
        Claimer(WeightClaim(DOWN, source=source, columns=(0, 256, 64))),
    )
    with native(plugin=plugin), opened(path) as ctx:
        (context,) = plugin.contexts
        first = {}
        for level in (0, 1, 2, 0, 2, 1, 0):
            context.level = level
            assert context.level == level
            found = evaluate(ctx)
            assert np.array_equal(found, first.setdefault(level, found))
        assert len({found.tobytes() for found in first.values()}) == 3
        context.level = 63
        assert np.array_equal(evaluate(ctx), first[2])  # the last one there is
        context.level = -1
        assert np.array_equal(evaluate(ctx), first[0])  # all of it


def test_a_level_may_change_within_a_sequence(model, tmp_path):
    path, plugin = model("llama", "F16"), Claimer(WeightClaim(UP, rows=(0, 64)))
    first, second = range(10, 30), range(30, 40)
    copy = zeroed(path, tmp_path / "zeroed.gguf", UP, rows=64)
    with opened(path) as wide, opened(copy) as narrow:
        assert decode(wide, first, 0) == 0
        hand_over(wide, narrow)
        expected = step(narrow, second, 20)
    with native(plugin=plugin), opened(path) as ctx:
        assert decode(ctx, first, 0) == 0
        plugin.contexts[0].level = 1
        assert np.array_equal(step(ctx, second, 20), expected)


def hand_over(wide, narrow):
    """Give one context the other's cells."""
    size = llama_cpp.llama_state_seq_get_size(wide, 0)
    cells = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(wide, cells, size, 0) == size
    assert llama_cpp.llama_state_seq_set_data(narrow, cells, size, 0) == size


def step(ctx, tokens, start):
    """Logits of a batch."""
    assert decode(ctx, tokens, start) == 0
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), (len(tokens), 4096)).copy()


def test_contexts_of_a_model_have_levels_of_their_own(model, tmp_path):
    path, plugin = model("llama", "Q4_0"), Claimer(WeightClaim(UP, rows=(0, 64)))
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


# -- models -----------------------------------------------------------------------------------


class OneModel(Claimer):
    """Claims the weights of one model file."""

    def __init__(self, path, *claims):
        super().__init__(*claims)
        self.path = str(path)

    @hookimpl
    def llmaas_weights(self, load):
        return list(self.claims) if load.path == self.path else []


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_a_model_whose_weights_have_the_same_names_keeps_its_own(model, tmp_path, source):
    path, other = model("llama", "Q8_0"), write_family("llama", tmp_path / "other.gguf", seed=1)
    claim = WeightClaim(UP, source=source, rows=(64,))
    narrow, left_alone = claimed(path, claim), vanilla(other)
    plugin = OneModel(path, claim)
    with native(plugin=plugin), opened(path) as one, opened(other) as two:
        for _ in range(2):
            assert np.array_equal(evaluate(one), narrow)
            assert np.array_equal(evaluate(two), left_alone)


def write_split(path, n):
    """The same model in ``n`` files, named as llama.cpp names them."""
    source = GGUFReader(path)
    paths = [path.parent / f"{path.stem}-{i + 1:05}-of-{n:05}.gguf" for i in range(n)]
    for i, part in enumerate(paths):
        writer = GGUFWriter(part, "llama")
        for name, entry in source.fields.items():
            if i == 0 and not name.startswith(("GGUF.", "general.architecture")):
                copy_field(writer, entry)
        writer.add_key_value("split.no", i, GGUFValueType.UINT16)
        writer.add_key_value("split.count", n, GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(source.tensors), GGUFValueType.INT32)
        for tensor in source.tensors[i::n]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("source", ["tiles", "file"])
def test_a_model_in_several_files(model, tmp_path, source):
    path = shutil.copyfile(model("llama", "Q4_0"), tmp_path / "model.gguf")
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


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_an_adapter_of_claimed_weights(model, tmp_path, source):
    """Its matrices are put where the weight's bytes would be; nobody claimed those."""
    path, lora = model("llama", "Q4_0"), write_lora("llama", tmp_path / "lora.gguf")
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
    """ggml-cpu's buffer type for repacked weights."""
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


def test_the_apps_own_overrides_stay_in_force(model, repacked_type):
    path = model("llama", "Q4_K")
    overrides = (Override * 2)(Override(b"ffn_(up|gate)", repacked_type))
    address = ctypes.cast(overrides, ctypes.c_void_p).value
    settings = {"tensor_buft_overrides": address, "use_extra_bufts": False}
    expected = vanilla(path, **settings)
    assert not np.array_equal(expected, vanilla(path, use_extra_bufts=False))
    claim = WeightClaim(DOWN, source="file")
    assert np.array_equal(claimed(path, claim, **settings), expected)


def test_the_apps_parameters_are_as_they_were(model):
    params = model_params()
    before = bytes(params)
    with native(plugin=Claimer(WeightClaim(DOWN, source="tiles"))):
        llama = llama_cpp.llama_model_load_from_file(str(model("llama")).encode(), params)
        assert bytes(params) == before
        llama_cpp.llama_model_free(llama)


# -- weights that stay in the file ------------------------------------------------------------

RESIDENT = """
import sys
import llama_cpp
from claiming import Claimer, created, evaluate, loaded, native
from llmaas_hooks import WeightClaim

def resident():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return 1024 * int(fields["VmRSS"].split()[0])

path, *patterns = sys.argv[1:]
claims = [WeightClaim(pattern, source="file") for pattern in patterns]
settings = {"load_mode": llama_cpp.LLAMA_LOAD_MODE_NONE, "use_extra_bufts": False}
with native(plugin=Claimer(*claims)):
    before = resident()
    with loaded(path, **settings) as model:
        print(resident() - before)
        with created(model) as ctx:
            evaluate(ctx)
"""


def resident_bytes(*arguments):
    support = Path(__file__).parents[1] / "support"
    # What malloc keeps for later is not what the model takes.
    environ = os.environ | {"PYTHONPATH": str(support), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", RESIDENT, *map(str, arguments)]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return int(said.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_stay_in_the_file_take_no_memory(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", SHAPE, GGMLQuantizationType.F16)
    n_bytes = 2 * 2 * SHAPE.n_layer * SHAPE.n_embd * SHAPE.n_ff
    assert n_bytes > 30e6
    saved = resident_bytes(path) - resident_bytes(path, r"blk\.\d+\.ffn_(up|down)\.weight")
    assert saved == pytest.approx(n_bytes, rel=0.2)


def test_a_file_that_is_cut_off_fails_the_batch(model, tmp_path):
    path = shutil.copyfile(model("llama", "Q8_0"), tmp_path / "model.gguf")
    last = max(GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    plugin = Claimer(WeightClaim(re.escape(last.name), source="file"))
    whole = path.stat().st_size
    with native(plugin=plugin), opened(path, load_mode=llama_cpp.LLAMA_LOAD_MODE_NONE) as ctx:
        expected = evaluate(ctx)
        os.truncate(path, last.data_offset)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        assert decode(ctx, range(10, 20), 0) != 0
        shutil.copyfile(model("llama", "Q8_0"), path)
        assert path.stat().st_size == whole
        assert np.array_equal(evaluate(ctx), expected)
