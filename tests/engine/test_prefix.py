"""Heads and neurons whose rows are skipped: nothing between their two products is computed.

The reference is stock llama.cpp on a model file with zeros in the columns that read them. Sums
have the same bits, because the same kernels run.
"""

from __future__ import annotations

import functools
import itertools

import llama_cpp
import numpy as np
import pytest
from claiming import (
    CELLS,
    Claimer,
    add_adapter,
    created,
    decode,
    evaluate,
    hand_over,
    loaded,
    native,
    opened,
    step,
)
from matrices import zeroed
from soak import scale
from watching import Watch

from llmaas_hooks import WeightClaim

LAYER = r"blk\.\d+\."
QUERIES, OUTPUT = LAYER + r"attn_q\.weight", LAYER + r"attn_output\.weight"
GATES, DOWN = LAYER + r"ffn_(gate|up)(_exps)?\.weight", LAYER + r"ffn_down(_exps)?\.weight"
HEAD, GROUP = 64, 128
"""Columns of one head, and of two heads that share keys: half of all heads."""
LEVELS = ((None, None), (GROUP, 256), (GROUP, 64), (None, 128))
"""Columns of the kept heads and neurons, by level."""
FAMILIES = (
    *(("llama", weights) for weights in ("F32", "F16", "Q8_0", "Q4_0")),
    *(("qwen2", "Q4_0"), ("qwen3", "F16"), ("qwen3", "Q4_0"), ("gemma", "F16")),
    *(("gemma2", "F16"), ("gemma3", "Q8_0"), ("llama-moe", "F16")),
)
EVERY = [*itertools.product(FAMILIES, CELLS)]
SOME = [*zip(FAMILIES, itertools.cycle(CELLS), strict=False)]
EACH_CACHE = pytest.mark.parametrize("cells", CELLS)


def claims_of(levels=LEVELS, source=None):
    heads, neurons = zip(*levels, strict=True)
    return (
        WeightClaim(QUERIES, source, rows=heads),
        WeightClaim(OUTPUT, source, columns=heads),
        WeightClaim(GATES, source, rows=neurons),
        WeightClaim(DOWN, source, columns=neurons),
    )


@pytest.fixture
def stock(family, tmp_path):
    """Return a function that writes a file with only a level's heads and neurons."""

    @functools.cache
    def write(name, weights, heads, neurons):
        path = family(name, weights)
        for i, (pattern, columns) in enumerate(((OUTPUT, heads), (DOWN, neurons))):
            copy = tmp_path / f"{name}-{weights}-{heads}-{neurons}-{i}.gguf"
            path = path if columns is None else zeroed(path, copy, pattern, columns=columns)
        return path

    return write


def threads(n):
    return {"n_threads": n, "n_threads_batch": n}


def evaluated(path, before=lambda _model, _ctx: None, **settings):
    with loaded(path) as model, created(model, **settings) as ctx:
        before(model, ctx)
        return evaluate(ctx)


def n_cut(context):
    return context.stats()["cut"]


@pytest.mark.soak
@pytest.mark.parametrize(("model", "cells"), scale(SOME, EVERY))
def test_what_is_left_out_is_as_if_it_were_zeros(family, stock, model, cells):
    name, weights = model
    plugin, path = Claimer(*claims_of()), family(name, weights)
    settings = CELLS[cells] | threads(3)
    with native(plugin=plugin), loaded(path) as llama, created(llama, **settings) as ctx:
        (context,) = plugin.contexts
        for level in (1, 2, 3, 0):
            context.level, before = level, n_cut(context)
            expected = evaluated(stock(name, weights, *LEVELS[level]), **settings)
            assert np.array_equal(evaluate(ctx), expected)
            assert (n_cut(context) > before) == (level > 0)


@pytest.mark.parametrize("source", ["tiles", "file"])
def test_wherever_the_weights_are(family, stock, source):
    plugin, path = Claimer(*claims_of(source=source)), family("llama", "Q4_0")
    settings = {"use_extra_bufts": source == "tiles"}
    with native(plugin=plugin), loaded(path, **settings) as llama, created(llama) as ctx:
        (context,) = plugin.contexts
        context.level = 1
        found = evaluate(ctx)
        assert n_cut(context) == 3 * 2 * N_CUT["flash attention"]
    with opened(stock("llama", "Q4_0", *LEVELS[1]), **settings) as ctx:
        expected = evaluate(ctx)
    if source == "file":
        assert np.array_equal(found, expected)
    else:  # otherwise tiles are multiplied one by one
        np.testing.assert_allclose(found, expected, atol=0.1)


@pytest.mark.parametrize("cells", ["transposed", "flash attention"])
def test_sequences_with_cells_of_their_own(family, stock, cells):
    settings = CELLS[cells] | {"n_seq_max": 2, "kv_unified": False, "n_ctx": 512}

    def converse(ctx):
        rows = [(seq, 9 + seq + at, at) for seq in (0, 1) for at in range(20)]
        return [together(ctx, rows), together(ctx, [(0, 5, 20), (1, 6, 20)])]

    with loaded(stock("llama", "F16", *LEVELS[2])) as llama, created(llama, **settings) as ctx:
        expected = converse(ctx)
    plugin, path = Claimer(*claims_of()), family("llama", "F16")
    with native(plugin=plugin), loaded(path) as llama, created(llama, **settings) as ctx:
        plugin.contexts[0].level = 2
        found = converse(ctx)
        assert n_cut(plugin.contexts[0]) >= 2 * 2 * N_CUT[cells]
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def together(ctx, rows):
    """Return logits of the last row of a batch of (sequence, token, position)."""
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, token, position) in enumerate(rows):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        batch.logits[i] = i == len(rows) - 1
    assert llama_cpp.llama_decode(ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), (4096,)).copy()


N_CUT = {"transposed": 13, "flash attention": 10, "q8_0": 16}
"""Narrowed nodes of a llama layer: three of neurons, the others of heads."""


@EACH_CACHE
def test_how_many_nodes_of_a_layer_are_cut(family, cells):
    plugin = Claimer(*claims_of())
    path = family("llama", "Q4_0")
    with native(plugin=plugin), loaded(path) as model, created(model, **CELLS[cells]) as ctx:
        (context,) = plugin.contexts
        for level, expected in enumerate((0, N_CUT[cells], N_CUT[cells], 3)):
            context.level, before = level, n_cut(context)
            decode(ctx, range(20), 0)
            assert n_cut(context) - before == 2 * expected
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        stats = context.stats()
    assert stats["passed"] == 1


@pytest.mark.parametrize("cells", ["transposed", "flash attention"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_levels_may_change_with_each_batch(family, stock, name, cells):
    """A level's results depend on the cells alone, whichever level filled them."""
    path, plugin = family(name, "F16"), Claimer(*claims_of())
    batches = [(range(10, 30), 0), ([30], 20), ([31], 21), (range(40, 45), 22), ([50], 27)]
    levels = (1, 3, 0, 2, 1)
    settings = CELLS[cells] | threads(2)
    with native(plugin=plugin), loaded(path) as model, created(model, **settings) as ctx:
        for level, (tokens, start) in zip(levels, batches, strict=True):
            with (
                loaded(stock(name, "F16", *LEVELS[level])) as alone,
                created(alone, **settings) as other,
            ):
                if start > 0:
                    hand_over(ctx, other)
                expected = step(other, tokens, start)
            plugin.contexts[0].level = level
            assert np.array_equal(step(ctx, tokens, start), expected)


def test_a_layer_without_heads_and_neurons(family, stock):
    plugin, path = Claimer(*claims_of([(0, 0)])), family("qwen2", "F16")
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        (context,) = plugin.contexts
        density = context.density()
        assert np.array_equal(evaluate(ctx), evaluated(stock("qwen2", "F16", 0, 0)))
        assert n_cut(context) == 3 * 2 * (N_CUT["flash attention"] + 1)
        assert context.stats()["taps"] == 0
        assert not density.read(37)[1].any()


# -- what needs more ----------------------------------------------------------------------------


def test_heads_that_are_no_whole_groups_are_zeros(family, stock):
    plugin, path = Claimer(*claims_of([(HEAD, 256)])), family("llama", "F16")
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        found = evaluate(ctx)
        assert n_cut(plugin.contexts[0]) == 3 * 2 * 3  # nodes of neurons
    assert np.array_equal(found, evaluated(stock("llama", "F16", HEAD, 256)))


@pytest.mark.parametrize("node", ["Qcur-1", "ffn_gate-0", "kqv_out-1", "ffn_swiglu-1"])
def test_what_an_app_looks_at_is_whole(family, stock, tmp_path, node):
    plugin, path = Claimer(*claims_of()), family("llama", "F16")
    watch = Watch(lambda tensor: tensor.name == node.encode())
    with native(plugin=plugin), loaded(path) as model, created(model, **watch.settings) as ctx:
        plugin.contexts[0].level = 2
        found = evaluate(ctx)
    seen = watch.take()
    copy = zeroed(stock("llama", "F16", *LEVELS[2]), tmp_path / "heads.gguf", QUERIES, rows=GROUP)
    copy = zeroed(copy, tmp_path / "zeroed.gguf", GATES, rows=64)
    assert np.array_equal(found, evaluated(copy, **watch.settings))
    assert len(seen) >= 3  # batches
    for values, expected in zip(seen, watch.take(), strict=True):
        assert np.array_equal(values, expected)


def test_an_adapter_of_queries(family, stock, lora):
    """The adapter also adds to skipped heads, whose results nobody reads."""
    plugin, path = Claimer(*claims_of()), family("llama", "F16")

    def adapt(model, ctx):
        add_adapter(model, ctx, lora)

    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        adapt(model, ctx)
        plugin.contexts[0].level = 1
        found = evaluate(ctx)
        assert n_cut(plugin.contexts[0]) > 3 * 2 * 3
    assert np.array_equal(found, evaluated(stock("llama", "F16", GROUP, 256), adapt))


# -- with taps ----------------------------------------------------------------------------------


@EACH_CACHE
def test_taps_see_the_heads_that_are_there(family, stock, cells):
    watch = Watch(lambda tensor: tensor.name.startswith(b"kq_soft_max"))
    settings = {"flash_attn_type": 0} | watch.settings
    evaluated(stock("llama", "F16", *LEVELS[1]), **settings)
    sums, counts = np.zeros(37), np.zeros(37)
    for probabilities in watch.take():  # shape [streams, heads, tokens, cells]
        seen = probabilities[0, :2, :, :37]
        sums += seen.sum((0, 1))
        counts += (seen > 0).sum((0, 1))
    plugin, path = Claimer(*claims_of()), family("llama", "F16")
    with native(plugin=plugin), loaded(path) as model, created(model, **CELLS[cells]) as ctx:
        (context,) = plugin.contexts
        context.level = 1
        with context.density() as density:
            evaluate(ctx)
        found = density.read(37)
    np.testing.assert_allclose(found[0], sums, rtol=0.02 if cells == "q8_0" else 0.005)
    assert np.array_equal(found[1], counts)


@pytest.mark.parametrize(
    ("activation", "n", "n_all"), [("attn_result", GROUP, 256), ("ffn_middle", 64, 512)]
)
def test_taps_see_the_columns_that_are_there(family, stock, activation, n, n_all):
    node = {"attn_result": b"kqv_out-1", "ffn_middle": b"ffn_swiglu-1"}[activation]
    watch = Watch(lambda tensor: tensor.name == node)
    evaluated(stock("llama", "F16", *LEVELS[2]), **watch.settings)
    rows = np.concatenate([values.reshape(-1, n_all) for values in watch.take()])
    plugin, path = Claimer(*claims_of()), family("llama", "F16")
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        (context,) = plugin.contexts
        context.level = 2
        with context.moments(activation, {1: n_all}) as moments:
            evaluate(ctx)
        n_rows, sums, squares = moments.read(1)
    assert n_rows == len(rows) == 37
    np.testing.assert_allclose(sums[:n], rows[:, :n].sum(0), atol=1e-4)
    np.testing.assert_allclose(squares[:n], np.square(rows[:, :n]).sum(0), rtol=1e-4)
    assert not sums[n:].any()
    assert not squares[n:].any()
