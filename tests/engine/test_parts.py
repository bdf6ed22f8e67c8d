"""Parts of claimed weights compute llama.cpp's results with zeros in place of the rest.

The reference is always stock llama.cpp: a model file whose unused rows or columns are zero must
give the logits of the narrowed original. Sums have the same bits wherever the same kernels run.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from claiming import (
    Claimer,
    claimed,
    created,
    decode,
    evaluate,
    hand_over,
    loaded,
    native,
    opened,
    step,
    vanilla,
    vanilla_once,
)
from matrices import CUT, DOWN, ROWS, TYPES, UP, columns_of, rounded, zeroed

from llmaas_hooks import WeightClaim

LAST_BITS = 0.03  # difference of logits that another number of threads makes
PLAIN, REPACKED = False, True  # values of use_extra_bufts


@pytest.mark.parametrize("extra", [PLAIN, REPACKED], ids=["plain", "repacked"])
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", ROWS)
def test_rows_left_out_are_rows_of_zeros(family, tmp_path, name, weights, extra):
    path = family(name, weights)
    pattern, n = ROWS[name]
    # Repacked rows are split at groups of 8, so both read the same rows.
    expected = zeroed(path, tmp_path / "zeroed.gguf", pattern, rows=rounded(n, 8))
    found = claimed(path, WeightClaim(pattern, rows=(rounded(n, 8),)), use_extra_bufts=extra)
    assert np.array_equal(found, vanilla(expected, use_extra_bufts=extra))
    assert not np.array_equal(found, vanilla_once(path, use_extra_bufts=extra))


@pytest.mark.parametrize("weights", ["F16", "Q8_0"])
def test_plain_rows_are_cut_anywhere(family, tmp_path, weights):
    path = family("llama", weights)
    settings = {"use_extra_bufts": False}
    found = claimed(path, WeightClaim(UP, rows=(101,)), **settings)
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=101), **settings)
    if weights == "F16":  # ggml-cpu multiplies 101 rows by another kernel than 512 rows
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
        # For F32 activations with gaps between rows, ggml-cpu uses another kernel.
        np.testing.assert_allclose(found, expected, atol=2e-3)
    else:
        assert np.array_equal(found, expected)
    assert np.abs(found - vanilla_once(path, use_extra_bufts=extra)).max() > 0.1


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
    path, claim = family("llama", "Q4_0"), WeightClaim(DOWN, source=source, columns=(None, 256))
    found = []
    for n_threads in (1, 3):
        plugin = Claimer(claim)
        with native(plugin=plugin), loaded(path) as llama:
            settings = {"n_threads": n_threads, "n_threads_batch": n_threads}
            with created(llama, **settings) as ctx:
                plugin.contexts[0].level = 1
                found.append(evaluate(ctx))
    assert np.array_equal(*found)


BLOCKS = r"blk\.1\.(attn_output|ffn_down)\.weight"


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_no_columns_take_a_layer_out(family, tmp_path, source):
    path = family("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", BLOCKS, columns=0))
    assert np.array_equal(claimed(path, WeightClaim(BLOCKS, source, columns=(0,))), expected)


def test_no_rows_are_rows_of_zeros(family, tmp_path):
    path = family("llama", "Q4_0")
    expected = vanilla(zeroed(path, tmp_path / "zeroed.gguf", UP, rows=0))
    assert np.array_equal(claimed(path, WeightClaim(UP, rows=(0,))), expected)


# -- biases -----------------------------------------------------------------------------------


def test_biases_are_those_of_a_model_that_has_them(family, tmp_path, biased):
    with_biases, biases = biased
    claims = []
    for name, values in biases.items():
        levels = np.stack([np.zeros_like(values), values])
        claims.append(WeightClaim(re.escape(name), columns=(None, 64), biases=levels))
    pattern = r"blk\.\d\.(attn_output|ffn_down)\.weight"
    expected = vanilla(zeroed(with_biases, tmp_path / "zeroed.gguf", pattern, columns=64))
    path = family("llama", "F16")
    assert np.array_equal(claimed(path, *claims, level=1), expected)
    assert np.array_equal(claimed(path, *claims, level=-1), vanilla(path))
    threads = {"n_threads": 3, "n_threads_batch": 3}
    plugin = Claimer(*claims)
    with native(plugin=plugin), loaded(path) as model, created(model, **threads) as ctx:
        evaluate(ctx)
        stats = plugin.contexts[0].stats()
        assert stats["passed"] == stats["graphs"]  # zero biases cost nothing
        plugin.contexts[0].level = 7  # the last level
        assert np.abs(evaluate(ctx) - expected).max() < LAST_BITS


# -- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_levels_change_between_batches_and_back(family, source):
    path, plugin = (
        family("llama", "Q4_0"),
        Claimer(WeightClaim(DOWN, source=source, columns=(None, 256, 64))),
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
        assert np.array_equal(evaluate(ctx), first[2])  # the last level
        context.level = -1
        assert np.array_equal(evaluate(ctx), first[0])  # all weights


def test_a_level_may_change_within_a_sequence(family, tmp_path):
    path, plugin = family("llama", "F16"), Claimer(WeightClaim(UP, rows=(None, 64)))
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


# -- exchanged extents ------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "file"])
def test_extents_may_be_exchanged(family, source):
    path = family("llama", "F16")
    plugin = Claimer(WeightClaim(DOWN, source, columns=(None, None)))
    with native(plugin=plugin), opened(path) as ctx:
        (context,) = plugin.contexts
        whole = evaluate(ctx)
        context.set_part("blk.0.ffn_down.weight", (None, 64))
        assert np.array_equal(evaluate(ctx), whole)
        context.level = 1
        narrow = evaluate(ctx)
        context.set_part("blk.0.ffn_down.weight", (None, 128, 0))
        context.set_part("blk.1.ffn_down.weight", [0])
        other = evaluate(ctx)
        context.set_part("blk.0.ffn_down.weight", (None, None))
        context.set_part("blk.1.ffn_down.weight", (None,))
        n_passed = context.stats()["passed"]
        assert np.array_equal(evaluate(ctx), whole)
        assert (context.stats()["passed"] > n_passed) == (source is None)
    claims = WeightClaim(r"blk\.0\.ffn_down\.weight", source, columns=(64,))
    assert np.array_equal(narrow, claimed(path, claims))
    first = WeightClaim(r"blk\.0\.ffn_down\.weight", source, columns=(128,))
    second = WeightClaim(r"blk\.1\.ffn_down\.weight", source, columns=(0,))
    assert np.array_equal(other, claimed(path, first, second))


def test_extents_that_cannot_be(family):
    plugin = Claimer(WeightClaim(DOWN, columns=(None,)))
    with native(plugin=plugin), opened(family("llama", "F16")):
        (context,) = plugin.contexts
        for extents in ((), (-1,), (None,) * 65):
            with pytest.raises(ValueError, match="up to 64 extents"):
                context.set_part("blk.0.ffn_down.weight", extents)
        for name in ("blk.0.ffn_up.weight", "blk.9.ffn_down.weight", ""):
            with pytest.raises(KeyError, match="no part of"):
                context.set_part(name, (8,))
    with native(plugin=plugin), opened(family("llama", "F16")):
        pass
    with pytest.raises(ReferenceError):
        context.set_part("blk.0.ffn_down.weight", (8,))


def test_a_context_of_a_model_without_claims_has_no_parts(native_context):
    with pytest.raises(KeyError, match="no part of"):
        native_context[1].set_part("blk.0.ffn_down.weight", (8,))
