"""The density that the tap sums, against llama.cpp's own tensors."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from batches import CONTEXT, PIECES, TOKENS, feed, pieces
from claiming import Claimer, created, decode, loaded, native
from equation1 import Equation1, own_operands, own_softmax
from gguf import GGMLQuantizationType
from watching import Watch

Q8_0 = int(GGMLQuantizationType.Q8_0)
OFF, ON = 0, 1
FAMILIES = ("llama", "qwen3", "gemma3", "llama-moe", "gpt-oss", "deepseek2", "granitehybrid")
BOTH_WAYS = pytest.mark.parametrize(("flash", "watch"), [(OFF, own_softmax), (ON, own_operands)])


def reference(path, batches, watch, *, row_step=1, layer_step=1, **settings):
    """Return Eq. 1 computed from vanilla's tensors."""
    n = max(start + len(tokens) for tokens, start in batches)
    expected = Equation1(n, row_step=row_step, layer_step=layer_step)
    with loaded(path) as model, created(model, **CONTEXT | settings | watch.settings) as ctx:
        watch.take()
        feed(ctx, batches, lambda start: expected.add(watch.take(), start))
    return expected


def tapped(path, batches, *, row_step=1, layer_step=1, **settings):
    """Return the tap's sums and counts."""
    n = max(start + len(tokens) for tokens, start in batches)
    plugin = Claimer()
    with native(plugin=plugin), loaded(path) as model, created(model, **CONTEXT | settings) as ctx:
        density = plugin.contexts[0].density(row_step=row_step, layer_step=layer_step)
        feed(ctx, batches)
        return density.read(n)


def assert_same(found, expected, tolerance=1e-4):
    sums, counts = found
    assert np.array_equal(counts, expected.counts)
    seen = counts > 0
    assert expected.sums[seen].all()
    assert (np.abs(sums - expected.sums)[seen] / expected.sums[seen]).max() <= tolerance
    assert not sums[~seen].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_density_is_equation_1(family, name):
    path, batches = family(name), list(pieces())
    expected = reference(path, batches, own_softmax(), flash_attn_type=OFF)
    assert_same(tapped(path, batches, flash_attn_type=OFF), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_density_with_flash_attention_is_equation_1_of_its_operands(family, name):
    path, batches = family(name), list(pieces())
    expected = reference(path, batches, own_operands(), flash_attn_type=ON)
    assert_same(tapped(path, batches, flash_attn_type=ON), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-moe"])
def test_flash_attention_changes_densities_as_it_changes_vanillas(family, name):
    """Flash attention rounds its sums to half precision, so later layers see other states.

    With F16 weights the difference is a thousandth of a few positions' sums. Q8_0 rounds the states
    as well.
    """
    path, batches = family(name, "F16"), list(pieces())
    expected = reference(path, batches, own_softmax(), flash_attn_type=OFF)
    sums, counts = tapped(path, batches, flash_attn_type=ON)
    assert np.array_equal(counts, expected.counts)
    assert np.abs(sums - expected.sums).sum() <= 1e-3 * expected.sums.sum()
    assert_same((sums, counts), expected, tolerance=2e-3)


def tokenize(model, text):
    vocab, room = llama_cpp.llama_model_get_vocab(model), 512
    tokens = (llama_cpp.llama_token * room)()
    raw = text.encode()
    n = llama_cpp.llama_tokenize(vocab, raw, len(raw), tokens, room, True, False)
    return tuple(tokens[:n])


def text_batches(path):
    with loaded(path) as model:
        tokens = tokenize(model, "The library opens at nine. Ask at the desk for a card. " * 8)
    return list(pieces(tokens, (60, 30, 1, 1)))


@BOTH_WAYS
def test_density_is_equation_1_on_text(reference_model, flash, watch):
    batches = text_batches(reference_model)
    expected = reference(reference_model, batches, watch(), flash_attn_type=flash)
    assert_same(tapped(reference_model, batches, flash_attn_type=flash), expected)


@pytest.mark.parametrize(
    ("settings", "watch"),
    [
        ({"type_k": Q8_0, "flash_attn_type": OFF}, own_softmax),
        ({"type_k": Q8_0, "flash_attn_type": ON}, own_operands),
        ({"type_k": Q8_0, "type_v": Q8_0, "flash_attn_type": ON}, own_operands),
    ],
    ids=["softmax", "flash", "flash, values too"],
)
def test_density_of_quantized_cells(family, settings, watch):
    path, batches = family("llama"), list(pieces())
    expected = reference(path, batches, watch(), **settings)
    assert_same(tapped(path, batches, **settings), expected)


@BOTH_WAYS
def test_density_of_graphs_that_come_in_pieces(family, flash, watch):
    """An app's own callback makes llama.cpp split the graphs."""
    path, batches = family("llama"), list(pieces())
    expected = reference(path, batches, watch(), flash_attn_type=flash)
    cut = Watch(lambda tensor: tensor.op % 3 == 0, lambda _tensor: None)
    assert_same(tapped(path, batches, flash_attn_type=flash, **cut.settings), expected)
    assert len(cut.take()) > len(PIECES)


def test_density_where_a_window_forgets_cells(family):
    """Gemma's second cache reuses cells; its softmax equals that of a cache that keeps them all."""
    path, batches, off = family("gemma3"), list(pieces()), {"flash_attn_type": OFF}
    expected = reference(path, batches, own_softmax(), swa_full=True, **off)
    assert_same(tapped(path, batches, swa_full=False, **off), expected)


@BOTH_WAYS
def test_a_position_that_is_evaluated_again_starts_again(family, flash, watch):
    path = family("llama")
    batches = [*pieces(), (TOKENS[:30], 70), (TOKENS[40:41], 100)]
    expected = reference(path, batches, watch(), flash_attn_type=flash)
    assert_same(tapped(path, batches, flash_attn_type=flash), expected)


@BOTH_WAYS
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sampled_density_is_that_of_the_sampled_rows_and_layers(family, name, flash, watch):
    path, batches = family(name), list(pieces())
    settings = {"row_step": 4, "layer_step": 2, "flash_attn_type": flash}
    expected = reference(path, batches, watch(), **settings)
    assert_same(tapped(path, batches, **settings), expected)


def test_reset_counts_from_0(native_context):
    ctx, context = native_context
    with context.density() as density:
        assert decode(ctx, TOKENS[:20], 0) == 0
        assert density.read(20)[1].all()
        density.reset()
        sums, counts = density.read(20)
    assert not sums.any()
    assert not counts.any()


def test_taken_positions_count_from_0(native_context):
    ctx, context = native_context
    with context.density() as density:
        assert decode(ctx, TOKENS[:20], 0) == 0
        expected = density.read(20)
        for found, wanted in zip(density.take(10), expected, strict=True):
            assert np.array_equal(found, wanted[:10])
        _, counts = density.read(20)
    assert not counts[:10].any()
    assert np.array_equal(counts[10:], expected[1][10:])


def test_where_positions_lie(native_context):
    ctx, context = native_context
    with context.density(layer_step=2) as density:
        assert decode(ctx, TOKENS[:20], 0) == 0
        cells = density.cells(20)
    assert (cells[0] == -1).all()  # a layer without a subscriber
    assert cells[1].tolist() == list(range(20))


@pytest.mark.parametrize("kept", [-1, 21])
def test_a_prefix_that_is_none_cannot_be_kept(native_context, kept):
    _, context = native_context
    with context.density() as density, pytest.raises(ValueError, match=f"keep {kept} of 20"):
        density.place(kept, 20)


def test_places_of_other_positions_are_refused(native_context):
    _, context = native_context
    with context.density() as density, pytest.raises(ValueError, match="cells have shape"):
        density.place(0, 20, density.cells(19))


@pytest.mark.parametrize("method", ["read", "take", "cells"])
def test_positions_beyond_the_context_are_refused(native_context, method):
    _, context = native_context
    with context.density() as density, pytest.raises(ValueError, match="the context has 256"):
        getattr(density, method)(257)
