"""Warm-up and training: their cells and those of the trained model are never mixed with others."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from llama_cpp._internals import LlamaContext
from switching import ENDINGS, OTHER, PROMPT, Conversation, ask
from weight_training import train

from llmaas_eval.models import Shape, write_random_model


def warmed_up(llama, prompt):
    """Return the first token's logits, computed by all experts of a mixture."""
    llama_cpp.llama_set_warmup(llama.ctx, True)
    row = ask(llama, prompt, 2)[1][0]
    llama_cpp.llama_set_warmup(llama.ctx, False)
    return row


def rows(conversation):
    """Return the logits of a prompt that is evaluated normally, in a warm-up, and in both."""
    with conversation.open() as llama:
        found = [ask(llama, PROMPT, 2)[1], warmed_up(llama, OTHER)]
        llama.reset()
        found += [warmed_up(llama, PROMPT), ask(llama, [*PROMPT, *ENDINGS[0]], 2)[1]]
        llama.reset()
        return [*found, ask(llama, OTHER, 2)[1]]


def test_cells_of_a_warm_up_are_not_stored(family, suite, report):
    conversation = Conversation(family("llama-moe"))
    expected = rows(conversation)
    assert not np.array_equal(expected[0][0], expected[2])  # the same prompt
    active = suite()
    assert all(map(np.array_equal, rows(conversation), expected))
    assert report(active)["left_alone"] == []
    assert report(active)["saves"] == 2  # of the first and the last
    active = suite()
    assert all(map(np.array_equal, rows(conversation), expected))


TEXT = np.random.default_rng(3).integers(300, 4000, 257).tolist()
SHAPE = Shape(n_layer=2, n_embd=64, n_head=4, n_head_kv=4, n_ff=64, n_ctx=256)


def trained(conversation):
    """Return logits before training, after it, and those of a context that was made later."""
    with conversation.open() as llama:
        found = [ask(llama, PROMPT, 4)[1]]
        train(llama.model, TEXT)
        found += [ask(llama, prompt, 4)[1] for prompt in (OTHER, PROMPT, OTHER)]
        llama._ctx.close()
        llama._ctx = LlamaContext(model=llama._model, params=llama.context_params, verbose=False)
        llama.reset()
        return found + [ask(llama, prompt, 4)[1] for prompt in (PROMPT, OTHER, PROMPT)]


@pytest.mark.skipif(llama_cpp.__version__ == "0.3.35", reason="its llama.cpp aborts in training")
def test_cells_of_trained_weights_are_not_stored(suite, report, tmp_path):
    path = write_random_model(tmp_path / "model.gguf", SHAPE, GGMLQuantizationType.F32)
    conversation = Conversation(path, {"use_mmap": False})
    expected = trained(conversation)
    assert not np.array_equal(expected[0][0], expected[2][0])  # the same prompt
    active = suite()
    assert all(map(np.array_equal, trained(conversation), expected))
    status = report(active)
    assert (status["saves"], status["restores"]) == (1, 0)
    assert "model.gguf: the app called llama_opt_epoch" in status["left_alone"]
    active = suite()
    with conversation.open() as llama:
        assert np.allclose(ask(llama, PROMPT, 1)[1], expected[0][0], atol=1e-3)
    assert report(active)["restores"] == 1
