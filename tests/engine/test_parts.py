"""Parts of claimed weights compute what llama.cpp computes with zeros in place of the rest.

The other side is stock llama.cpp throughout: a model file whose unused rows or columns are zero
gives what the narrowed original gives. Sums are the same bits wherever the same kernels run.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest
from claiming import (
    Claimer,
    claimed,
    created,
    decode,
    evaluate,
    loaded,
    native,
    opened,
    step,
    vanilla,
)
from matrices import CUT, DOWN, ROWS, TYPES, UP, columns_of, rounded, zeroed

from llmaas_hooks import WeightClaim

PLAIN, REPACKED = False, True  # what use_extra_bufts is


@pytest.mark.parametrize("extra", [PLAIN, REPACKED], ids=["plain", "repacked"])
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", ROWS)
def test_rows_left_out_are_rows_of_zeros(family, tmp_path, name, weights, extra):
    path = family(name, weights)
    pattern, n = ROWS[name]
    # Repacked rows are cut at groups of 8, so both read the same.
    expected = zeroed(path, tmp_path / "zeroed.gguf", pattern, rows=rounded(n, 8))
    found = claimed(path, WeightClaim(pattern, rows=(rounded(n, 8),)), use_extra_bufts=extra)
    assert np.array_equal(found, vanilla(expected, use_extra_bufts=extra))
    assert not np.array_equal(found, vanilla(path, use_extra_bufts=extra))


@pytest.mark.parametrize("weights", ["F16", "Q8_0"])
def test_plain_rows_are_cut_anywhere(family, tmp_path, weights):
    path = family("llama", weights)
    settings = {"use_extra_bufts": False}
    found = claimed(path, WeightClaim(UP, rows=(101,)), **settings)
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=101), **settings)
    if weights == "F16":  # 101 rows go through another of ggml-cpu's kernels than 512
        np.testing.assert_allclose(found, expected, atol=2e-3)
    else:
        assert np.array_equal(found, expected)
    fewer = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=100), **settings)
    assert np.abs(found - fewer).max() > 0.01


def test_repacked_rows_are_cut_at_eight(family, tmp_path):
    path = family("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=104), use_extra_bufts=True)
    found = claimed(path, WeightClaim(UP, rows=(97,)), use_extra_bufts=True)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("extra", [PLAIN, REPACKED], ids=["plain", "repacked"])
@pytest.mark.parametrize(("name", "weights"), CUT)
def test_columns_left_out_are_columns_of_zeros(family, tmp_path, name, weights, extra):
    path = family(name, weights)
    pattern, n = columns_of(name, weights)
    copy = zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=n)
    found = claimed(path, WeightClaim(pattern, columns=(n,)), use_extra_bufts=extra)
    expected = vanilla(copy, use_extra_bufts=extra)
    if (name, weights) in {("llama", "F32"), ("phi3", "F32")}:
        # F32 activations with gaps between their rows go through another of ggml-cpu's kernels.
        np.testing.assert_allclose(found, expected, atol=2e-3)
    else:
        assert np.array_equal(found, expected)
    assert np.abs(found - vanilla(path, use_extra_bufts=extra)).max() > 0.1


@pytest.mark.parametrize(("weights", "n", "block"), [("Q8_0", 250, 32), ("Q4_K", 100, 256)])
def test_columns_are_rounded_up_to_whole_blocks(family, tmp_path, weights, n, block):
    path = family("llama", weights)
    copy = zeroed(path, tmp_path / "zeroed.gguf", DOWN, columns=rounded(n, block))
    assert np.array_equal(claimed(path, WeightClaim(DOWN, columns=(n,))), vanilla(copy))


@pytest.mark.parametrize("weights", ["F16", "Q4_0"])
def test_columns_of_the_attention_output(family, tmp_path, weights):
    path, pattern = family("llama", weights), r"blk\.1\.attn_output\.weight"
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", pattern, columns=96))
    assert np.array_equal(claimed(path, WeightClaim(pattern, columns=(96,))), expected)


def test_rows_of_one_weight_and_the_columns_of_the_next_belong_together(family):
    path = family("llama", "Q4_0")
    gates = WeightClaim(r"blk\.\d+\.ffn_(up|gate)\.weight", rows=(256,))
    down = WeightClaim(DOWN, columns=(256,))
    assert np.array_equal(claimed(path, gates, down), claimed(path, gates))


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_a_part_is_one_on_several_threads_too(family, source):
    path, claim = family("llama", "Q4_0"), WeightClaim(DOWN, source=source, columns=(0, 256))
    found = []
    for n_threads in (1, 3):
        plugin = Claimer(claim)
        with native(plugin=plugin), loaded(path) as llama:
            settings = {"n_threads": n_threads, "n_threads_batch": n_threads}
            with created(llama, **settings) as ctx:
                plugin.contexts[0].level = 1
                found.append(evaluate(ctx))
    assert np.array_equal(*found)


# -- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_levels_change_between_batches_and_back(family, source):
    path, plugin = (
        family("llama", "Q4_0"),
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


def test_a_level_may_change_within_a_sequence(family, tmp_path):
    path, plugin = family("llama", "F16"), Claimer(WeightClaim(UP, rows=(0, 64)))
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
