"""The hidden states that the tap copies, against the tensors of llama.cpp's graph."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from batches import CONTEXT, PIECES, TOKENS, feed, pieces
from claiming import Claimer, created, loaded, native
from watching import Watch


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
