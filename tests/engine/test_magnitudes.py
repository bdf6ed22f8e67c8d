"""The magnitudes and moments that the taps count, against the tensors of llama.cpp's graph."""

from __future__ import annotations

import numpy as np
import pytest
from batches import CONTEXT, TOKENS, feed, pieces
from claiming import Claimer, created, decode, evaluate, loaded, native, vanilla
from watching import Watch, values_of

BUCKETS = 16320
CASES = [
    ("llama", "attn_input", 1, "attn_q"),
    ("llama", "attn_result", 0, "attn_output"),
    ("llama", "ffn_input", 0, "ffn_up"),
    ("llama", "ffn_middle", 1, "ffn_down"),
    ("phi3", "attn_input", 0, "attn_qkv"),
    ("gemma3", "attn_input", 2, "attn_v"),
    ("gemma3", "attn_result", 1, "attn_output"),
    ("gemma3", "ffn_middle", 0, "ffn_down"),
    ("llama-moe", "attn_input", 0, "attn_k"),
    ("llama-moe", "ffn_input", 1, "ffn_gate_inp"),
]


def operand_rows(path, layer, matrix):
    """Return the activations that vanilla multiplies a matrix with, one row per token."""
    name = f"blk.{layer}.{matrix}.weight".encode()

    def reads(node):
        return bool(node.src[0]) and node.src[0].contents.name == name

    watch = Watch(reads, lambda node: values_of(node.src[1].contents))
    with loaded(path) as model, created(model, **CONTEXT | watch.settings) as ctx:
        watch.take()
        feed(ctx, pieces())
        rows = [values.reshape(-1, values.shape[-1]) for values in watch.take()]
    return np.concatenate(rows)


@pytest.mark.parametrize(("name", "activation", "layer", "matrix"), CASES)
def test_what_is_counted_are_the_tensors_of_the_graph(family, name, activation, layer, matrix):
    path, plugin = family(name), Claimer()
    rows = operand_rows(path, layer, matrix)
    assert len(rows) == len(TOKENS)
    with native(plugin=plugin), loaded(path) as model, created(model, **CONTEXT) as ctx:
        counted = plugin.contexts[0].magnitudes(activation, {layer: rows.shape[1]})
        added = plugin.contexts[0].moments(activation, {layer: rows.shape[1]})
        feed(ctx, pieces())
        counts, sums = counted.read(layer)
        n_rows, values, squares = added.read(layer)
    buckets = np.abs(rows).view(np.uint32) >> 17
    assert np.array_equal(counts, np.bincount(buckets.ravel(), minlength=BUCKETS))
    assert np.allclose(sums, np.abs(rows).sum(axis=0, dtype=np.float64), rtol=1e-12, atol=0)
    exact = rows.astype(np.float64)
    assert n_rows == len(TOKENS)
    assert np.allclose(values, exact.sum(axis=0), rtol=0, atol=1e-12 * np.abs(exact).max())
    assert np.allclose(squares, (exact**2).sum(axis=0), rtol=1e-12, atol=0)


def test_large_values_of_two_layers_are_compared(family):
    path, plugin = family("llama"), Claimer()
    rows = [np.abs(operand_rows(path, layer, "ffn_up")) for layer in (0, 1)]
    thresholds = {
        layer: np.quantile(each, (0.2, 0.5, 0.9)).astype(np.float32)
        for layer, each in enumerate(rows)
    }
    with native(plugin=plugin), loaded(path) as model, created(model, **CONTEXT) as ctx:
        widths = dict.fromkeys(thresholds, rows[0].shape[1])
        compared = plugin.contexts[0].overlap(
            "ffn_input", widths, thresholds=thresholds, predictors={1: 0}
        )
        feed(ctx, pieces())
        used, both = compared.read(1)
        assert [each.tolist() for each in compared.read(0)] == [[0, 0, 0]] * 2
    large = [rows[layer][..., None] >= thresholds[layer] for layer in (0, 1)]
    assert np.array_equal(used, large[1].sum(axis=(0, 1)))
    assert np.array_equal(both, (large[0] & large[1]).sum(axis=(0, 1)))
    assert (both < used).all()


def test_what_cannot_be_compared(native_context):
    _, context = native_context
    known, widths = dict.fromkeys((0, 1), np.ones(3, np.float32)), {0: 256, 1: 256}
    for thresholds, n_channels, predictors, says in (
        ({0: np.ones(3, np.float32)}, widths, {}, "expected 1 to 32 thresholds"),
        (dict.fromkeys((0, 1), np.ones(33, np.float32)), widths, {}, "expected 1 to 32 thresholds"),
        (known, widths, {0: 1}, "layer 0 cannot be compared with layer 1"),
        (known, {0: 255, 1: 256}, {1: 0}, "layer 1 cannot be compared with layer 0"),
        (known, {0: 256, 2: 256}, {}, "equally many"),
    ):
        with pytest.raises(ValueError, match=says):
            context.overlap("ffn_input", n_channels, thresholds=thresholds, predictors=predictors)


def test_counting_changes_nothing(family):
    path, plugin = family("llama"), Claimer()
    expected = vanilla(path)
    widths = {"attn_input": 256, "attn_result": 256, "ffn_input": 256, "ffn_middle": 512}
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        counted = [plugin.contexts[0].magnitudes(a, {0: n, 1: n}) for a, n in widths.items()]
        assert np.array_equal(evaluate(ctx), expected)
        assert [int(one.read(1)[0].sum()) for one in counted] == [37 * n for n in widths.values()]


def test_what_was_counted_can_be_read_later(native_context):
    ctx, context = native_context
    with context.magnitudes("ffn_middle", {0: 512}) as counted:
        assert decode(ctx, TOKENS[:20], 0) == 0
        before = counted.read(0)
    assert decode(ctx, TOKENS[20:30], 20) == 0
    assert before[0].sum() == 20 * 512
    assert all(np.array_equal(now, then) for now, then in zip(counted.read(0), before, strict=True))


@pytest.mark.parametrize(
    ("name", "activation", "n_channels"),
    [("llama", "ffn_middle", 511), ("llama-moe", "ffn_middle", 256)],
    ids=["another width", "experts"],
)
def test_what_is_not_counted(family, name, activation, n_channels):
    plugin = Claimer()
    with native(plugin=plugin), loaded(family(name)) as model, created(model) as ctx:
        counted = plugin.contexts[0].magnitudes(activation, {0: n_channels})
        assert decode(ctx, TOKENS[:20], 0) == 0
        counts, sums = counted.read(0)
    assert counts.sum() == 0
    assert len(sums) == n_channels
    assert not sums.any()


def test_errors(native_context):
    _, context = native_context
    for activation, n_channels, says in (
        ("final_norm", {0: 256}, "activation must be one of attn_input"),
        ("ffn_input", {2: 256}, "asked for layers .2., but the model has 2"),
        ("ffn_input", {-1: 256}, "asked for layers .-1."),
        ("ffn_input", {}, "asked for layers ..,"),
        ("ffn_input", {0: 256, 1: 0}, "1 or more channels, found 0"),
    ):
        for count in (context.magnitudes, context.moments):
            with pytest.raises(ValueError, match=says):
                count(activation, n_channels)
    counted = context.magnitudes("ffn_input", {1: 256})
    with pytest.raises(ValueError, match="layer 0 is not counted"):
        counted.read(0)
