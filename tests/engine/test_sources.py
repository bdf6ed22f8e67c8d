"""Weights in tiles or in the file: products equal those that llama.cpp computes from memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import llama_cpp
import numpy as np
import pytest
from claiming import (
    Claimer,
    claimed,
    decode,
    evaluate,
    in_a_process,
    native,
    opened,
    vanilla,
    vanilla_once,
)
from gguf import GGMLQuantizationType, GGUFReader
from matrices import COLUMNS, CUT, DOWN, ROWS, TYPES, columns_of, zeroed

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import WeightClaim

LOAD_MODES = ("NONE", "MMAP", "DIRECT_IO")


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_tile_of_all_columns_is_the_weight_as_ggml_would_keep_it(family, name, weights):
    path = family(name, weights)
    found = claimed(path, WeightClaim(COLUMNS[name][0], source="tiles"), use_extra_bufts=True)
    assert np.array_equal(found, vanilla_once(path, use_extra_bufts=True))


@pytest.mark.parametrize(("name", "weights"), CUT)
def test_columns_up_to_a_cut_are_one_tile(family, tmp_path, name, weights):
    path = family(name, weights)
    pattern, n = columns_of(name, weights)
    copy = zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=n)
    claim = WeightClaim(pattern, source="tiles", columns=(None, n))
    found = claimed(path, claim, level=1, use_extra_bufts=True)
    assert np.array_equal(found, vanilla(copy, use_extra_bufts=True))


def test_sums_of_tiles_are_the_product_but_for_rounding(family, tmp_path):
    path, cuts = family("llama", "Q4_0"), tuple(range(32, 512, 32))  # 16 tiles, the maximum
    claim = WeightClaim(DOWN, source="tiles", columns=cuts)
    for level in (-1, 4, 14):
        copy = tmp_path / "zeroed.gguf"
        expected = path if level < 0 else zeroed(path, copy, DOWN, columns=cuts[level])
        found = claimed(path, claim, level=level)
        np.testing.assert_allclose(found, vanilla(expected), atol=0.1)


@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_read_from_the_file_is_what_was_in_memory(family, name, weights):
    path = family(name, weights)
    pattern = f"{ROWS[name][0]}|{COLUMNS[name][0]}"
    found = claimed(path, WeightClaim(pattern, source="file"), use_extra_bufts=False)
    assert np.array_equal(found, vanilla_once(path, use_extra_bufts=False))


@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("name", ROWS)
def test_parts_of_what_is_read_from_the_file(family, tmp_path, name, weights):
    path, copy = family(name, weights), tmp_path / "zeroed.gguf"
    pattern, n = ROWS[name]
    found = claimed(path, WeightClaim(pattern, source="file", rows=(n,)), use_extra_bufts=False)
    expected = vanilla(zeroed(path, copy, pattern, rows=n), use_extra_bufts=False)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("source", ["tiles", "file"])
def test_one_plugin_claims_the_source_and_another_the_part(family, source):
    path = family("llama", "Q8_0")
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
def test_sources_work_however_the_file_is_loaded(family, source, load_mode):
    path = family("llama", "Q4_0")
    mode = getattr(llama_cpp, f"LLAMA_LOAD_MODE_{load_mode}")
    settings = {"load_mode": mode, "use_extra_bufts": source == "tiles"}
    found = claimed(path, WeightClaim(DOWN, source=source), **settings)
    assert np.array_equal(found, vanilla_once(path, **settings))


# -- weights that stay in the file ------------------------------------------------------------

SHAPE = Shape(n_layer=2, n_embd=1024, n_head=8, n_head_kv=4, n_ff=5120, n_ctx=512)
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
    # memory that malloc keeps for later does not belong to the model
    environ = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = in_a_process(RESIDENT, *arguments, start=subprocess.run, **environ)
    assert done.returncode == 0, done.stderr[-1000:]
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_stay_in_the_file_take_no_memory(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", SHAPE, GGMLQuantizationType.F16)
    n_bytes = 2 * 2 * SHAPE.n_layer * SHAPE.n_embd * SHAPE.n_ff
    assert n_bytes > 30e6
    saved = resident_bytes(path) - resident_bytes(path, r"blk\.\d+\.ffn_(up|down)\.weight")
    assert saved == pytest.approx(n_bytes, rel=0.2)


def test_a_file_that_is_cut_off_fails_the_batch(family, tmp_path):
    path = shutil.copyfile(family("llama", "Q8_0"), tmp_path / "model.gguf")
    last = max(GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    plugin = Claimer(WeightClaim(re.escape(last.name), source="file"))
    with native(plugin=plugin), opened(path, load_mode=llama_cpp.LLAMA_LOAD_MODE_NONE) as ctx:
        evaluate(ctx)
        os.truncate(path, last.data_offset)
        assert decode(ctx, range(10, 20), 0) != 0
        shutil.copyfile(family("llama", "Q8_0"), path)  # the old bytes may have been read meanwhile
        assert decode(ctx, range(10, 20), 0) != 0
