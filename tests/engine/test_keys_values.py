"""Keys and values of groups that a level leaves out: cells have zeros there, whatever was there.

Models of the families have two groups of two query heads. The narrow level uses the first group.
"""

from __future__ import annotations

import contextlib
from types import MappingProxyType

import llama_cpp
import numpy as np
import pytest
from cell_rows import cell_rows, exported, imported
from claiming import (
    CELLS,
    Claimer,
    add_adapter,
    created,
    evaluate,
    loaded,
    native,
    opened,
    step,
)

from llmaas_eval.elastic.cutting import write_cut
from llmaas_hooks import WeightClaim
from llmaas_plugins.elastic.parts import part_claims
from llmaas_plugins.elastic.units import Widths, all_units, blocks_of

WIDE, NARROW = 0, 1
TOKENS = range(5, 40)


def levels_of(blocks):
    """Return all units, and half of each layer's units."""
    half = np.ones(blocks.n_layers, np.int32)
    return [all_units(blocks), Widths(half * blocks.n_groups // 2, half * blocks.n_ff // 2)]


def claims_on(path, *, cuts=True):
    blocks = blocks_of(path, cuts_keys_values=cuts)
    return part_claims(blocks, levels_of(blocks))


@contextlib.contextmanager
def narrowed(path, model_settings=MappingProxyType({}), *, cuts=True, **settings):
    """Open a context on a model with levels; yield it and its native context."""
    plugin = Claimer(*claims_on(path, cuts=cuts))
    with (
        native(plugin=plugin),
        loaded(path, **model_settings) as model,
        created(model, **settings) as ctx,
    ):
        yield ctx, plugin.contexts[0]


def halves(rows):
    """Return the first group's bytes and the second's, of all layers."""
    width = rows[0].shape[1] // 2
    return np.stack([one[:, :width] for one in rows]), np.stack([one[:, width:] for one in rows])


@pytest.mark.parametrize("settings", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_cells_have_zeros_for_groups_left_out(family, name, settings):
    """Biases of keys and values are in qwen2, norms of keys in qwen3 and gemma3."""
    path, found = family(name), {}
    for cuts in (False, True):
        with narrowed(path, cuts=cuts, **settings) as (ctx, context):
            context.level = NARROW
            found[cuts] = evaluate(ctx), *map(halves, cell_rows(exported(ctx)))
    logits, *cells = found[True]
    expected, *whole = found[False]
    assert np.array_equal(logits, expected)
    for (first, second), (expected, rest) in zip(cells, whole, strict=True):
        assert np.array_equal(first, expected)
        assert first.any()
        assert rest.any()
        assert not second.any()


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "repacked"])
@pytest.mark.parametrize("weights", ["F16", "Q8_0", "Q4_0"])
def test_a_level_computes_a_model_with_those_heads_removed(family, tmp_path, weights, extra):
    path, model = family("llama", weights), {"use_extra_bufts": extra}
    cut = write_cut(path, levels_of(blocks_of(path))[NARROW], tmp_path / "cut.gguf")
    with opened(cut, **model) as ctx:
        expected, cells = evaluate(ctx), cell_rows(exported(ctx))
    with narrowed(path, model) as (ctx, context):
        context.level = NARROW
        found = evaluate(ctx)
        for own, of_cut in zip(cell_rows(exported(ctx)), cells, strict=True):
            first, second = halves(own)
            assert np.array_equal(first[0], of_cut[0])  # later layers read sums in other orders
            assert not second.any()
    np.testing.assert_allclose(found, expected, atol=0.05)


@pytest.mark.parametrize("settings", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_level_that_changes_on_the_way(family, name, settings):
    """Wide cells lie where narrow ones are written, and both lie in one context."""
    path = family(name)
    with narrowed(path, **settings) as (ctx, context):
        memory = llama_cpp.llama_get_memory(ctx)
        step(ctx, TOKENS, 0)
        wide = cell_rows(exported(ctx))
        llama_cpp.llama_memory_clear(memory, False)  # the bytes stay
        for level, tokens, start in ((NARROW, TOKENS[:9], 0), (WIDE, TOKENS[9:20], 9)):
            context.level = level
            found = step(ctx, tokens, start)
        context.level = NARROW
        step(ctx, TOKENS[20:21], 20)
        context.level = WIDE
        mixed = exported(ctx)
        after = step(ctx, TOKENS[21:22], 21)
    is_narrow = np.array([*[True] * 9, *[False] * 11, True])
    for rows, of_wide in zip(cell_rows(mixed), wide, strict=True):
        first, second = halves(rows)
        assert not second[:, is_narrow].any()
        assert second[:, ~is_narrow].any(axis=(0, 2)).all()
        assert first.any(axis=(0, 2)).all()
        assert np.array_equal(first[0][is_narrow], halves(of_wide)[0][0][:21][is_narrow])
    with loaded(path) as model, created(model, **settings) as ctx:
        imported(ctx, mixed)
        assert np.array_equal(step(ctx, TOKENS[21:22], 21), after)  # zeros are what is read
    assert np.isfinite(found).all()


def test_an_adapter_of_llama_cpp_adds_nothing_to_groups_left_out(family, lora):
    """The adapter is of queries and values; its product has all rows."""
    path = family("llama")
    plugin = Claimer(*claims_on(path))
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        add_adapter(model, ctx, lora)
        plugin.contexts[0].level = NARROW
        evaluate(ctx)
        for rows in cell_rows(exported(ctx)):
            first, second = halves(rows)
            assert first.any()
            assert not second.any()


def test_no_group_at_all(family):
    """Studies leave whole layers out."""
    path = family("qwen2")
    claims = [WeightClaim(r"blk\.0\.attn_[kv]\.weight", rows=(None, 0))]
    plugin = Claimer(*claims)
    with native(plugin=plugin), opened(path) as ctx:
        plugin.contexts[0].level = NARROW
        evaluate(ctx)
        for rows in cell_rows(exported(ctx)):
            assert not rows[0].any()
            assert rows[1].any()
