"""What the shipped taps say is what llama.cpp's own tensors say."""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import llama_cpp
import numpy as np
import pytest
from claiming import Claimer, created, decode, evaluate, loaded, native, vanilla
from gguf import GGMLQuantizationType, quants
from watching import Watch, values_of

Q8_0 = int(GGMLQuantizationType.Q8_0)
OFF, ON = 0, 1
FAMILIES = ("llama", "qwen3", "gemma3", "llama-moe", "gpt-oss", "deepseek2", "granitehybrid")
TOKENS = tuple(range(300, 420))
PIECES = (50, 40, 27, 1, 1, 1)
CONTEXT = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 32}


def pieces(tokens=TOKENS, lengths=PIECES):
    """A conversation: batches of tokens and where each starts."""
    start = 0
    for length in lengths:
        yield tokens[start : start + length], start
        start += length


def feed(ctx, batches, after=lambda _start: None):
    """Evaluate batches, each from its start on; what was there is dropped."""
    for tokens, start in batches:
        memory = llama_cpp.llama_get_memory(ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)
        assert decode(ctx, tokens, start) == 0
        after(start)


class Attention(NamedTuple):
    """A layer's softmax and mask, columns last."""

    layer: int
    probabilities: np.ndarray
    mask: np.ndarray


def is_softmax(tensor):
    return tensor.name.startswith(b"kq_soft_max-")


def read_softmax(tensor):
    layer = int(tensor.name.decode().rpartition("-")[2])
    return Attention(layer, values_of(tensor)[0], values_of(tensor.src[1].contents)[0, 0])


def key_layer(tensor):
    """The layer whose cached keys a node reads second; -1: none."""
    root = tensor.src[1].contents.view_src
    name = root.contents.name if root else b""
    return int(name.removeprefix(b"cache_k_l")) if name.startswith(b"cache_k_l") else -1


def is_flash(tensor):
    return bool(tensor.src[3]) and key_layer(tensor) >= 0


def read_flash(tensor):
    """The softmax that flash attention leaves implicit, in double precision."""
    query, key, _, mask = (values_of(tensor.src[i].contents)[0] for i in range(4))
    kind = GGMLQuantizationType(tensor.src[1].contents.type)  # ggml rounds queries like the keys
    query = quants.dequantize(quants.quantize(query, kind), kind).astype(np.float64)
    key = np.repeat(key.astype(np.float64), len(query) // len(key), axis=0)
    mask = mask[0, : query.shape[1]].astype(np.float64)
    scale = struct.unpack_from("f", bytes(tensor.op_params))[0]
    scores = query @ key.transpose(0, 2, 1) * scale + mask
    most = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - most)
    total = exponentials.sum(-1, keepdims=True)
    if tensor.src[4]:
        sinks = values_of(tensor.src[4].contents).reshape(-1, 1, 1).astype(np.float64)
        total += np.exp(sinks - most)
    return Attention(key_layer(tensor), exponentials / total, mask)


def own_softmax():
    return Watch(is_softmax, read_softmax)


def own_operands():
    return Watch(is_flash, read_flash)


class Equation1:
    """Eq 1 of LLMS from the softmax of every layer, in order; column j is position j.

    A position that is evaluated again counts anew.
    """

    def __init__(self, n, *, row_step=1, layer_step=1):
        self.sums, self.counts = np.zeros(n), np.zeros(n, np.uint64)
        self._row_step, self._layer_step = row_step, layer_step

    def add(self, seen, start):
        """Count what a batch computed."""
        last = max(node.layer for node in seen)
        for layer, probabilities, mask in seen:
            n_heads, n_rows, _ = probabilities.shape
            rows = np.arange(start, start + n_rows)
            if layer == 0:
                self.sums[rows], self.counts[rows] = 0, 0
            if layer % self._layer_step == self._layer_step - 1:
                looked_at = rows % self._row_step == self._row_step - 1
                self._add(probabilities[:, looked_at], mask[:n_rows][looked_at], n_heads)
            if layer == last:
                start += n_rows

    def _add(self, probabilities, mask, n_heads):
        n = min(len(self.sums), mask.shape[1])
        visible = np.isfinite(mask[:, :n])
        self.sums[:n] += probabilities.sum((0, 1), dtype=np.float64)[:n]
        self.counts[:n] += (visible.sum(0) * n_heads).astype(np.uint64)


def reference(path, batches, watch, *, row_step=1, layer_step=1, **settings):
    """Eq 1 by what vanilla computes."""
    n = max(start + len(tokens) for tokens, start in batches)
    expected = Equation1(n, row_step=row_step, layer_step=layer_step)
    with loaded(path) as model, created(model, **CONTEXT | settings | watch.settings) as ctx:
        watch.take()
        feed(ctx, batches, lambda start: expected.add(watch.take(), start))
    return expected


def tapped(path, batches, *, row_step=1, layer_step=1, **settings):
    """Sums and counts by the tap."""
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
    """It rounds what it sums to half precision, so the layers after the first see other states.

    In F16 weights that is a thousandth of a few positions' sums; Q8_0 rounds the states as well.
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


@pytest.mark.parametrize(("flash", "watch"), [(OFF, own_softmax), (ON, own_operands)])
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
def test_density_of_quantised_cells(family, settings, watch):
    path, batches = family("llama"), list(pieces())
    expected = reference(path, batches, watch(), **settings)
    assert_same(tapped(path, batches, **settings), expected)


@pytest.mark.parametrize(("flash", "watch"), [(OFF, own_softmax), (ON, own_operands)])
def test_density_of_graphs_that_come_in_pieces(family, flash, watch):
    """An app's own callback has llama.cpp cut them."""
    path, batches = family("llama"), list(pieces())
    expected = reference(path, batches, watch(), flash_attn_type=flash)
    cut = Watch(lambda tensor: tensor.op % 3 == 0, lambda _tensor: None)
    assert_same(tapped(path, batches, flash_attn_type=flash, **cut.settings), expected)
    assert len(cut.take()) > len(PIECES)


def test_density_where_a_window_forgets_cells(family):
    """Gemma's second cache reuses cells; its softmax is that of a cache that keeps them all."""
    path, batches, off = family("gemma3"), list(pieces()), {"flash_attn_type": OFF}
    expected = reference(path, batches, own_softmax(), swa_full=True, **off)
    assert_same(tapped(path, batches, swa_full=False, **off), expected)


@pytest.mark.parametrize(("flash", "watch"), [(OFF, own_softmax), (ON, own_operands)])
def test_a_position_that_is_evaluated_again_starts_again(family, flash, watch):
    path = family("llama")
    batches = [*pieces(), (TOKENS[:30], 70), (TOKENS[40:41], 100)]
    expected = reference(path, batches, watch(), flash_attn_type=flash)
    assert_same(tapped(path, batches, flash_attn_type=flash), expected)


@pytest.mark.parametrize(("flash", "watch"), [(OFF, own_softmax), (ON, own_operands)])
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


# -- hidden states ---------------------------------------------------------------------------------


@pytest.fixture
def native_context(family):
    """A context on the llama family, and what plugins see of it."""
    plugin = Claimer()
    with (
        native(plugin=plugin),
        loaded(family("llama")) as model,
        created(model, **CONTEXT) as ctx,
    ):
        yield ctx, plugin.contexts[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-moe"])
@pytest.mark.parametrize(
    ("states", "layer", "tensor"),
    [
        ("ffn_input", None, "ffn_norm-{last}"),
        ("ffn_input", 1, "ffn_norm-1"),
        ("ffn_input", 0, "ffn_norm-0"),
        ("final_norm", None, "result_norm"),
    ],
    ids=["last layer", "layer 1", "layer 0", "final norm"],
)
def test_states_are_the_tensors_of_the_graph(family, name, states, layer, tensor):
    path, plugin = family(name), Claimer()
    last = 2 if name == "gemma3" else 1
    node_name = tensor.format(last=last).encode()
    watch = Watch(lambda node: node.name == node_name)
    with loaded(path) as model, created(model, **CONTEXT | watch.settings) as ctx:
        watch.take()
        feed(ctx, pieces())
        rows = [values.reshape(-1, values.shape[-1]) for values in watch.take()]
    with native(plugin=plugin), loaded(path) as model, created(model, **CONTEXT) as ctx:
        captured = plugin.contexts[0].hidden_states(states, layer=layer)
        feed(ctx, pieces())
        found = captured.take()
        assert captured.n_lost == 0
        assert len(captured.take()) == 0
    assert len(found) == len(TOKENS)
    assert np.array_equal(found, np.concatenate(rows))


def test_the_last_layer_sees_only_the_tokens_whose_logits_are_wanted(native_context):
    ctx, context = native_context
    kinds = (("ffn_input", 0), ("ffn_input", 1), ("final_norm", None))
    taps = [context.hidden_states(states, layer=layer) for states, layer in kinds]
    tokens = (llama_cpp.llama_token * 20)(*TOKENS[:20])
    assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(tokens, 20)) == 0
    assert [len(tap.take()) for tap in taps] == [20, 1, 1]


def test_states_come_piece_by_piece(native_context):
    ctx, context = native_context
    whole, captured = context.hidden_states("final_norm"), context.hidden_states("final_norm")
    taken = []
    feed(ctx, pieces(), lambda _start: taken.append(captured.take()))
    assert [len(rows) for rows in taken] == list(PIECES)
    assert np.array_equal(np.concatenate(taken), whole.take())


def test_rows_beyond_the_capacity_are_lost_oldest_first(native_context):
    ctx, context = native_context
    whole, newest = (
        context.hidden_states("final_norm"),
        context.hidden_states("final_norm", capacity=7),
    )
    feed(ctx, pieces())
    rows = newest.take()
    assert newest.n_lost == len(TOKENS) - 7
    assert np.array_equal(rows, whole.take()[-7:])


# -- subscriptions ---------------------------------------------------------------------------------


def test_nothing_is_added_when_nobody_subscribes(native_context):
    ctx, context = native_context
    assert decode(ctx, TOKENS[:20], 0) == 0
    assert context.stats()["taps"] == 0
    with context.density(), context.hidden_states("final_norm") as states:
        assert decode(ctx, TOKENS[20:21], 20) == 0
        during = context.stats()
    assert during["taps"] == 2 + 1
    assert decode(ctx, TOKENS[21:22], 21) == 0
    after = context.stats()
    assert after["taps"] == during["taps"]
    assert after["passed"] == during["passed"] + 1
    assert len(states.take()) == 1


def test_a_subscription_ends_once(native_context):
    ctx, context = native_context
    states, other = context.hidden_states("final_norm"), context.hidden_states("final_norm")
    states.close()
    states.close()
    assert decode(ctx, TOKENS[:20], 0) == 0
    assert len(states.take()) == 0
    assert len(other.take()) == 20


def test_a_context_has_16_taps(native_context):
    _, context = native_context
    taps = [context.density() for _ in range(16)]
    with pytest.raises(RuntimeError, match="16 taps"):
        context.hidden_states("final_norm")
    taps[0].close()
    context.hidden_states("final_norm")


def test_a_freed_context_says_so(family):
    plugin = Claimer()
    with native(plugin=plugin), loaded(family("llama")) as model:
        with created(model) as ctx:
            context = plugin.contexts[0]
            density = context.density()
            assert decode(ctx, TOKENS[:20], 0) == 0
        for use in (context.stats, context.density, lambda: context.level):
            with pytest.raises(ReferenceError):
                use()
        with pytest.raises(ReferenceError):
            context.level = 1
        assert density.read(20)[1].all()  # what was counted stays
        density.close()


def test_a_context_outlives_the_suite(family):
    path, plugin = family("llama"), Claimer()
    expected = vanilla(path)
    with contextlib.ExitStack() as stack:
        suite = native(plugin=plugin)
        try:
            ctx = stack.enter_context(created(stack.enter_context(loaded(path))))
            context = plugin.contexts[0]
            states = context.hidden_states("final_norm")
            assert np.array_equal(evaluate(ctx), expected)
            n_rows = len(states.take())
        finally:
            suite.deactivate()
        with pytest.raises(ReferenceError):
            context.stats()
        assert np.array_equal(evaluate(ctx), expected)
        assert n_rows > 0
        assert len(states.take()) == 0
